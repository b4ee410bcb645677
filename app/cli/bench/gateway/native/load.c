/* Load for measuring gateways: chat completions over keep-alive connections of one thread, every answer checked.
 *
 *   load --port P --connections C (--seconds S | --requests N) [--header "name: value"]
 *        [--tokens T [--burst B] [--interval-us U]]   streams of T events; without it, complete answers
 *        [--body-bytes N] [--ramp PER_SECOND] [--timeout SECONDS] [--announce EVENTS]
 *
 * A complete answer counts when it is a whole 200 with the mock worker's text; a stream, when all T events came in
 * order, none twice, and [DONE] after them. Everything else is a failure, counted by kind. Prints one JSON object.
 * With --announce each connection has one stream, and a line of its own is printed before that, once every stream has had
 * so many events (or has failed).
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { HEAD_ROOM = 8192, LINE_ROOM = 1024, CHECK_US = 200000 };
enum phase { IDLE, HEAD, BODY, OVER }; /* OVER: this connection has no more to do */
enum chunk { SIZE, DATA, DATA_END, TRAILER };

typedef struct conn {
    int fd, connecting, chunked, close_after, status, has_data, done, wrong, announced;
    enum phase phase;
    enum chunk chunk;
    long length, left, events;
    uint64_t sent_us;
    int first;
    size_t head_len, line_len;
    char head[HEAD_ROOM + 1], line[LINE_ROOM + 1]; /* line: of the stream, or the whole answer's text */
} conn;

typedef struct samples {
    uint32_t *us;
    size_t len, room;
} samples;

static int poller, port, tokens;
static long connections = 1, total = -1, announce_at = -1;
static double seconds = -1, timeout_seconds = 60, ramp;
static char *request;
static size_t request_len;
static uint64_t end_us;
static long issued, completed, events, held, open_conns;
static long bad_status, bad_closed, bad_connect, bad_short, bad_content, bad_timeout;
static int last_status, shown;
static samples latency, first_event;

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

static void *need(void *memory) {
    if (!memory) {
        fputs("load: out of memory\n", stderr);
        exit(1);
    }
    return memory;
}

static void add(samples *to, uint64_t us) {
    if (to->len == to->room) {
        to->room = to->room ? to->room * 2 : 4096;
        to->us = need(realloc(to->us, to->room * sizeof *to->us));
    }
    to->us[to->len++] = us > UINT32_MAX ? UINT32_MAX : (uint32_t)us;
}

static void begin(conn *c);

static void announced(conn *c) {
    if (announce_at < 0 || c->announced) return;
    c->announced = 1;
    if (++held == connections) {
        printf("{\"held\":%ld}\n", held - (bad_status + bad_closed + bad_connect + bad_short + bad_content + bad_timeout));
        fflush(stdout);
    }
}

static void drop(conn *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
    c->connecting = 0;
}

static void fail(conn *c, long *kind) {
    (*kind)++;
    drop(c);
    announced(c);
    begin(c);
}

static void complain(conn *c, const char *what) { /* the first failure's own words, for whoever must find its cause */
    if (shown++) return;
    fprintf(stderr, "%s: %.300s\n%.300s\n", what, c->head, c->line);
}

static void finish(conn *c) {
    int wrong = c->wrong;
    if (c->status != 200) {
        last_status = c->status;
        complain(c, "status");
        fail(c, &bad_status);
        return;
    }
    if (!tokens && !wrong) {
        c->line[c->line_len] = 0;
        wrong = !strstr(c->line, "A small mock answer") || c->line[c->line_len - 1] != '}';
    }
    if (wrong) {
        complain(c, "content");
        fail(c, &bad_content);
    } else if (tokens && (c->events != tokens || !c->done)) {
        complain(c, "short");
        fail(c, &bad_short);
    } else {
        completed++;
        add(&latency, now_us() - c->sent_us);
        if (c->close_after) drop(c);
        begin(c);
    }
}

static int connect_to(conn *c) {
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS) {
        close(fd);
        return -1;
    }
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    c->fd = fd;
    c->connecting = 1;
    return 0;
}

/* Requests are small against a socket's buffer, and there is one at a time: what is not taken whole shows as failure. */
static void send_request(conn *c) {
    if (send(c->fd, request, request_len, MSG_NOSIGNAL) != (ssize_t)request_len) fail(c, &bad_closed);
}

static int more(void) { return total >= 0 ? issued < total : now_us() < end_us; }

static void begin(conn *c) {
    if (!more() || c->announced) {
        drop(c);
        c->phase = OVER;
        open_conns--;
        return;
    }
    issued++;
    c->phase = HEAD;
    c->chunk = SIZE;
    c->chunked = c->close_after = c->has_data = c->done = c->wrong = c->first = c->status = 0;
    c->length = -1;
    c->left = c->events = 0;
    c->head_len = c->line_len = 0;
    c->head[0] = c->line[0] = 0;
    c->sent_us = now_us();
    if (c->fd >= 0) {
        send_request(c);
    } else if (connect_to(c)) {
        /* No descriptor or no port: it would be so again at once. */
        bad_connect++;
        announced(c);
        c->phase = OVER;
        open_conns--;
    }
}

/* One line of a stream, without its end. An empty one ends an event. */
static void stream_line(conn *c, const char *line, size_t len, uint64_t now) {
    if (len && line[len - 1] == '\r') len--;
    if (!len) {
        c->has_data = 0;
        return;
    }
    if (len < 6 || memcmp(line, "data: ", 6)) {
        if (line[0] != ':') c->wrong = 1; /* comments are no events */
        return;
    }
    if (c->has_data || c->done) c->wrong = 1;
    c->has_data = 1;
    if (len == 12 && !memcmp(line + 6, "[DONE]", 6)) {
        c->done = 1;
        return;
    }
    const char *content = memmem(line, len, "\"content\":\" t", 13);
    if (!content || strtol(content + 13, NULL, 10) != c->events + 1) {
        c->wrong = 1;
        return;
    }
    if (!c->first) {
        c->first = 1;
        add(&first_event, now - c->sent_us);
    }
    c->events++;
    events++;
    if (c->events == announce_at) announced(c);
}

static void body(conn *c, const char *data, size_t len, uint64_t now) {
    if (!tokens || c->status != 200) {
        size_t took = len < LINE_ROOM - c->line_len ? len : LINE_ROOM - c->line_len;
        if (took < len && c->status == 200) c->wrong = 1;
        memcpy(c->line + c->line_len, data, took);
        c->line_len += took;
        return;
    }
    while (len) {
        const char *end = memchr(data, '\n', len);
        size_t part = end ? (size_t)(end - data) : len;
        if (c->line_len || !end) {
            size_t room = LINE_ROOM - c->line_len;
            if (part > room) {
                c->wrong = 1;
                c->line_len = 0;
            } else {
                memcpy(c->line + c->line_len, data, part);
                c->line_len += part;
                c->line[c->line_len] = 0;
                if (end) {
                    stream_line(c, c->line, c->line_len, now);
                    c->line_len = 0;
                }
            }
        } else {
            stream_line(c, data, part, now);
        }
        if (!end) return;
        len -= part + 1;
        data = end + 1;
    }
}

/* Bytes of an answer; 1 when it is complete, -1 when it is not HTTP. */
static int feed(conn *c, const char *data, size_t len) {
    uint64_t now = now_us();
    if (c->phase == HEAD) {
        size_t before = c->head_len, room = HEAD_ROOM - c->head_len, took = len < room ? len : room;
        memcpy(c->head + c->head_len, data, took);
        c->head_len += took;
        c->head[c->head_len] = 0;
        char *end = strstr(c->head, "\r\n\r\n");
        if (!end) return c->head_len == HEAD_ROOM ? -1 : 0;
        if (strncmp(c->head, "HTTP/1.1 ", 9)) return -1;
        end[2] = 0;
        c->status = atoi(c->head + 9);
        const char *found = strcasestr(c->head, "\r\ncontent-length:");
        if (found) c->length = c->left = atol(found + 17);
        c->chunked = strcasestr(c->head, "\r\ntransfer-encoding: chunked") != NULL;
        c->close_after = strcasestr(c->head, "\r\nconnection: close") != NULL;
        c->phase = BODY;
        size_t used = (size_t)(end + 4 - c->head) - before;
        data += used;
        len -= used;
        if (!c->chunked && !c->length) return 1;
    }
    if (!c->chunked) {
        if (c->length >= 0 && (long)len > c->left) return -1;
        body(c, data, len, now);
        c->left -= (long)len;
        return c->length >= 0 && !c->left;
    }
    while (len) {
        if (c->chunk == DATA) {
            size_t took = (long)len < c->left ? len : (size_t)c->left;
            body(c, data, took, now);
            data += took;
            len -= took;
            c->left -= (long)took;
            if (!c->left) c->chunk = DATA_END;
            continue;
        }
        char ch = *data++;
        len--;
        if (c->chunk == SIZE) {
            if (ch == '\n') {
                c->chunk = c->left ? DATA : TRAILER;
            } else if (ch != '\r') {
                int digit = ch >= '0' && ch <= '9' ? ch - '0' : (ch | 32) >= 'a' && (ch | 32) <= 'f' ? (ch | 32) - 'a' + 10 : -1;
                if (digit < 0 || c->left > 1 << 28) return -1;
                c->left = c->left * 16 + digit;
            }
        } else if (ch == '\n') { /* DATA_END, or the empty line that is all of the trailers */
            if (c->chunk == TRAILER) return len ? -1 : 1;
            c->chunk = SIZE;
        } else if (ch != '\r') {
            return -1;
        }
    }
    return 0;
}

static void readable(conn *c) {
    static char buffer[262144];
    ssize_t got = recv(c->fd, buffer, sizeof buffer, 0);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        if (!got && c->phase == BODY && !c->chunked && c->length < 0) { /* an answer that ends with its connection */
            drop(c);
            finish(c);
            return;
        }
        complain(c, "closed");
        fail(c, &bad_closed);
        return;
    }
    int whole = feed(c, buffer, (size_t)got);
    if (whole > 0) {
        finish(c);
    } else if (whole < 0) {
        complain(c, "not HTTP");
        fail(c, &bad_content);
    }
}

static void connected(conn *c) {
    int error = 0;
    socklen_t len = sizeof error;
    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &len);
    if (error) {
        bad_connect++;
        announced(c);
        drop(c);
        c->phase = OVER;
        open_conns--;
        return;
    }
    c->connecting = 0;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event);
    c->sent_us = now_us();
    send_request(c);
}

static int by_value(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static void print_samples(const char *name, samples *of) {
    if (!of->len) {
        printf(",\"%s\":null", name);
        return;
    }
    qsort(of->us, of->len, sizeof *of->us, by_value);
    printf(",\"%s\":{\"p50\":%u,\"p99\":%u}", name, of->us[of->len / 2], of->us[of->len * 99 / 100]);
}

static void make_request(const char *header, long burst, long interval_us, long body_bytes) {
    size_t room = (size_t)(body_bytes > 0 ? body_bytes : 0) + 1024;
    char *text = need(malloc(room)), *p = text;
    p += sprintf(p, "{\"model\":\"mock-model\",\"messages\":[{\"role\":\"user\",\"content\":\"Say hello to the mock worker. ");
    if (tokens) p += sprintf(p, "burst=%ld interval_us=%ld ", burst, interval_us);
    while (p - text + 48 < body_bytes) {
        *p = (p - text) % 6 ? 'w' : ' ';
        p++;
    }
    p += sprintf(p, "\"}],\"max_tokens\":%d", tokens ? tokens : 10);
    if (tokens) p += sprintf(p, ",\"stream\":true");
    p += sprintf(p, "}");
    room += strlen(header) + 512;
    request = need(malloc(room));
    int len = snprintf(request, room,
                       "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: hotspare-bench\r\nAccept: */*\r\n"
                       "Content-Type: application/json\r\n%s%sContent-Length: %zu\r\n\r\n%s",
                       port, header, *header ? "\r\n" : "", (size_t)(p - text), text);
    request_len = (size_t)len;
    free(text);
}

int main(int argc, char **argv) {
    static const struct option OPTIONS[] = {
        {"port", 1, NULL, 'p'},    {"connections", 1, NULL, 'c'}, {"seconds", 1, NULL, 's'},     {"requests", 1, NULL, 'n'},
        {"tokens", 1, NULL, 't'},  {"burst", 1, NULL, 'b'},       {"interval-us", 1, NULL, 'i'}, {"body-bytes", 1, NULL, 'B'},
        {"header", 1, NULL, 'H'},  {"ramp", 1, NULL, 'r'},        {"timeout", 1, NULL, 'T'},     {"announce", 1, NULL, 'a'},
        {NULL, 0, NULL, 0},
    };
    long burst = 1, interval_us = 0, body_bytes = 0;
    const char *extra_header = "";
    for (int option; (option = getopt_long(argc, argv, "", OPTIONS, NULL)) != -1;) {
        switch (option) {
        case 'p': port = atoi(optarg); break;
        case 'c': connections = atol(optarg); break;
        case 's': seconds = atof(optarg); break;
        case 'n': total = atol(optarg); break;
        case 't': tokens = atoi(optarg); break;
        case 'b': burst = atol(optarg); break;
        case 'i': interval_us = atol(optarg); break;
        case 'B': body_bytes = atol(optarg); break;
        case 'H': extra_header = optarg; break;
        case 'r': ramp = atof(optarg); break;
        case 'T': timeout_seconds = atof(optarg); break;
        case 'a': announce_at = atol(optarg); break;
        default: return 2;
        }
    }
    if (port <= 0 || connections < 1 || (total < 0 && seconds <= 0)) {
        fputs("load: --port, --connections and --seconds or --requests are needed\n", stderr);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);

    make_request(extra_header, burst, interval_us, body_bytes);
    poller = epoll_create1(EPOLL_CLOEXEC);
    conn *all = need(calloc((size_t)connections, sizeof *all));
    static struct epoll_event ready[1024];
    uint64_t began_us = now_us(), check_us = began_us + CHECK_US;
    end_us = began_us + (uint64_t)(seconds > 0 ? seconds * 1e6 : 0);
    open_conns = connections;
    long started = 0;
    while (open_conns) {
        uint64_t now = now_us();
        while (started < connections && (ramp <= 0 || (double)(now - began_us) * ramp / 1e6 >= (double)started)) {
            all[started].fd = -1;
            begin(&all[started++]);
        }
        int count = epoll_wait(poller, ready, 1024, started < connections ? 1 : 100);
        for (int i = 0; i < count; i++) {
            conn *c = ready[i].data.ptr;
            if (c->fd < 0) continue;
            if (c->connecting) connected(c);
            else readable(c);
        }
        now = now_us();
        if (now < check_us) continue;
        check_us = now + CHECK_US;
        for (long i = 0; i < started; i++) {
            conn *c = &all[i];
            if (c->phase != OVER && (double)(now - c->sent_us) > timeout_seconds * 1e6) {
                complain(c, "timeout");
                fail(c, &bad_timeout);
            }
        }
    }
    printf("{\"seconds\":%.6f,\"completed\":%ld,\"events\":%ld", (double)(now_us() - began_us) / 1e6, completed, events);
    print_samples("latency_us", &latency);
    print_samples("first_event_us", &first_event);
    printf(",\"failed\":{\"status\":%ld,\"closed\":%ld,\"connect\":%ld,\"short\":%ld,\"content\":%ld,\"timeout\":%ld},"
           "\"last_status\":%d}\n",
           bad_status, bad_closed, bad_connect, bad_short, bad_content, bad_timeout, last_status);
    return 0;
}

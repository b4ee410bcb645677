/* A worker without an engine, for measuring gateways: one thread, epoll, nothing per event but the bytes.
 *
 * Listens on a free port of 127.0.0.1 and prints it. Serves chat completions, complete or as a stream of server-sent
 * events, what routers ask a worker (health, models, versions), and Hotspare's watch. How a stream goes stands in the
 * request, where every gateway passes it on (some know no other fields than their own): max_tokens, and in the prompt
 *
 *   burst=500 interval_us=3000000
 *
 * is 500 events as fast as the connection takes them, then one every three seconds. Each event carries its number, so
 * that the other end sees whether one is missing. A request with x-hotspare-stream: 1 gets an answer that says the
 * same, and a token note before each unit: the running count and CRC-32 of all event bytes, and the unit's token. The last unit is two events, the one
 * with the finish reason and [DONE].
 *
 * POST /mock/finish lets all streams that are under way go on without waiting. GET /mock/stats counts.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
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

enum { MAX_REQUEST = 1 << 20, MAX_UNIT = 1024, BEAT_US = 1000000, BACKLOG = 8192 };

typedef struct conn {
    int fd;
    int closed, close_after, watching, queued, writable_wanted;
    char *in;
    size_t in_len, in_room;
    char *out; /* what the socket did not take */
    size_t out_len, out_off;
    /* the stream, while total > 0 */
    long total, sent, burst;
    uint64_t interval_us, due_us;
    int notes;
    uint32_t crc;
    long heap_at; /* place in the heap of waiting streams, -1: not there */
    struct conn *next_ready, *next_dead, *next_watch;
} conn;

static int poller, port;
static conn *ready_head, *ready_tail, *dead, *watchers;
static size_t ready_count;
static conn **heap;
static size_t heap_len, heap_room;
static long requests, active, finished, cancelled, steps;
static unsigned long watch_seq;

static const char ANSWER[] =
    "{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion\",\"created\":1700000000,"
    "\"model\":\"mock-model\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"A small mock answer "
    "of ten tokens.\"},\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":12,\"total_tokens\":22,"
    "\"completion_tokens\":10}}";
static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: uvicorn\r\n"
    "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n";
static const char NOTED[] = "x-hotspare-stream: 1\r\n\r\n";

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

static void *need(void *memory) {
    if (!memory) {
        fputs("mock worker: out of memory\n", stderr);
        exit(1);
    }
    return memory;
}

/* CRC-32 as zlib's, eight bytes at a time. */

static uint32_t crc_table[8][256];

static void make_crc_tables(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; bit++) value = value & 1 ? 0xedb88320u ^ (value >> 1) : value >> 1;
        crc_table[0][byte] = value;
    }
    for (int slice = 1; slice < 8; slice++)
        for (int byte = 0; byte < 256; byte++)
            crc_table[slice][byte] = (crc_table[slice - 1][byte] >> 8) ^ crc_table[0][crc_table[slice - 1][byte] & 255];
}

static uint32_t crc32_of(uint32_t crc, const char *data, size_t len) {
    const unsigned char *p = (const unsigned char *)data;
    crc = ~crc;
    for (; len >= 8; len -= 8, p += 8) {
        uint32_t low, high;
        memcpy(&low, p, 4);
        memcpy(&high, p + 4, 4);
        low ^= crc;
        crc = crc_table[7][low & 255] ^ crc_table[6][low >> 8 & 255] ^ crc_table[5][low >> 16 & 255] ^
              crc_table[4][low >> 24] ^ crc_table[3][high & 255] ^ crc_table[2][high >> 8 & 255] ^
              crc_table[1][high >> 16 & 255] ^ crc_table[0][high >> 24];
    }
    while (len--) crc = crc_table[0][(crc ^ *p++) & 255] ^ (crc >> 8);
    return ~crc;
}

/* Connections that wait for their time: a binary heap by due_us. */

static void heap_put(size_t at, conn *c) {
    heap[at] = c;
    c->heap_at = (long)at;
}

static void heap_up(size_t at) {
    conn *c = heap[at];
    while (at > 0 && heap[(at - 1) / 2]->due_us > c->due_us) {
        heap_put(at, heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    heap_put(at, c);
}

static void heap_down(size_t at) {
    conn *c = heap[at];
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= heap_len) break;
        if (child + 1 < heap_len && heap[child + 1]->due_us < heap[child]->due_us) child++;
        if (heap[child]->due_us >= c->due_us) break;
        heap_put(at, heap[child]);
        at = child;
    }
    heap_put(at, c);
}

static void heap_add(conn *c) {
    if (heap_len == heap_room) {
        heap_room = heap_room ? heap_room * 2 : 1024;
        heap = need(realloc(heap, heap_room * sizeof *heap));
    }
    heap_put(heap_len++, c);
    heap_up(heap_len - 1);
}

static void heap_remove(conn *c) {
    size_t at = (size_t)c->heap_at;
    c->heap_at = -1;
    conn *last = heap[--heap_len];
    if (last == c) return;
    heap_put(at, last);
    heap_up(at);
    heap_down((size_t)last->heap_at);
}

static void make_ready(conn *c) {
    if (c->queued) return;
    c->queued = 1;
    c->next_ready = NULL;
    if (ready_tail) ready_tail->next_ready = c;
    else ready_head = c;
    ready_tail = c;
    ready_count++;
}

static void close_conn(conn *c) {
    if (c->closed) return;
    c->closed = 1;
    close(c->fd);
    if (c->heap_at >= 0) heap_remove(c);
    if (c->total) {
        cancelled++;
        active--;
        c->total = 0;
    }
    if (c->watching)
        for (conn **at = &watchers; *at; at = &(*at)->next_watch)
            if (*at == c) {
                *at = c->next_watch;
                break;
            }
    c->next_dead = dead;
    dead = c;
}

/* Freed at the end of a turn: events of this turn may still name them. One in the ready queue waits for its turn. */
static void bury_the_dead(void) {
    conn *later = NULL;
    while (dead) {
        conn *c = dead;
        dead = c->next_dead;
        if (c->queued) {
            c->next_dead = later;
            later = c;
            continue;
        }
        free(c->in);
        free(c->out);
        free(c);
    }
    dead = later;
}

static void want_writable(conn *c, int wanted) {
    if (c->writable_wanted == wanted) return;
    struct epoll_event event = {.events = EPOLLIN | (wanted ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event);
    c->writable_wanted = wanted;
}

static void send_bytes(conn *c, const char *data, size_t len) {
    if (c->closed) return;
    if (!c->out_len) {
        ssize_t took = send(c->fd, data, len, MSG_NOSIGNAL);
        if (took < 0) {
            if (errno != EAGAIN) {
                close_conn(c);
                return;
            }
            took = 0;
        }
        data += took;
        len -= (size_t)took;
    }
    if (!len) return;
    c->out = need(realloc(c->out, c->out_len + len));
    memcpy(c->out + c->out_len, data, len);
    c->out_len += len;
    want_writable(c, 1);
}

static void answer(conn *c, const char *type, const char *body) {
    char head[256];
    int len = snprintf(head, sizeof head,
                       "HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: uvicorn\r\n"
                       "content-length: %zu\r\ncontent-type: %s\r\n\r\n",
                       strlen(body), type);
    char whole[4096];
    if ((size_t)len + strlen(body) >= sizeof whole) abort();
    memcpy(whole, head, (size_t)len);
    strcpy(whole + len, body);
    send_bytes(c, whole, (size_t)len + strlen(body));
}

static void send_watch_line(conn *c) {
    char line[512], chunk[600];
    int len = snprintf(line, sizeof line,
                       "{\"worker\":\"mock-%d\",\"instance\":\"mock-%d-%d\",\"epoch\":1,\"engine\":\"a\",\"state\":\"ACTIVE\","
                       "\"models\":[\"mock-model\"],\"inflight\":%ld,\"capacity\":100000,\"steps\":%ld,\"standby\":\"STANDBY\","
                       "\"kv_usage\":0.0,\"seq\":%lu}\n",
                       port, port, (int)getpid(), active, steps, watch_seq++);
    len = snprintf(chunk, sizeof chunk, "%x\r\n%s\r\n", (unsigned)len, line);
    send_bytes(c, chunk, (size_t)len);
}

/* The next unit of a stream as one chunk of HTTP. */
static size_t make_unit(conn *c, char *into) {
    char events[MAX_UNIT / 2], note[128];
    long number = ++c->sent;
    int last = number == c->total, count = last ? 2 : 1;
    int len = sprintf(events,
                      "data: {\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\","
                      "\"created\":1700000000,\"model\":\"mock-model\",\"choices\":[{\"index\":0,\"delta\":{\"content\":"
                      "\" t%07ld\"},\"finish_reason\":%s}]}\n\n%s",
                      number, last ? "\"stop\"" : "null", last ? "data: [DONE]\n\n" : "");
    int note_len = 0;
    if (c->notes) {
        c->crc = crc32_of(c->crc, events, (size_t)len);
        note_len = sprintf(note, ": t e=%ld n=%d c=%08x g=0:%ld%s\n", number + last, count, c->crc, 300 + number % 30000,
                           number == 1 ? " t=1700000000 p=0" : "");
    }
    char *p = into + sprintf(into, "%x\r\n", (unsigned)(note_len + len));
    memcpy(p, note, (size_t)note_len);
    memcpy(p + note_len, events, (size_t)len);
    p += note_len + len;
    memcpy(p, "\r\n0\r\n\r\n", 7);
    p += last ? 7 : 2;
    return (size_t)(p - into);
}

static void parse(conn *c);

static void schedule(conn *c) {
    if (c->closed || !c->total || c->out_len || c->heap_at >= 0) return;
    if (c->sent < c->burst || !c->interval_us) make_ready(c);
    else heap_add(c);
}

static void send_unit(conn *c) {
    char unit[MAX_UNIT + 16];
    steps++;
    size_t len = make_unit(c, unit);
    int last = c->sent == c->total;
    if (last) {
        c->total = 0;
        active--;
        finished++;
    }
    send_bytes(c, unit, len);
    if (last && !c->closed) parse(c);
}

static long number_after(const char *text, const char *name, long otherwise) {
    const char *at = strstr(text, name);
    return at ? atol(at + strlen(name)) : otherwise;
}

/* A JSON field's value, past the colon and blanks; NULL where it is not there. */
static const char *field(const char *body, const char *quoted) {
    const char *at = strstr(body, quoted);
    if (!at) return NULL;
    at += strlen(quoted);
    while (*at == ' ' || *at == ':') at++;
    return at;
}

static void chat(conn *c, const char *body, int notes) {
    requests++;
    const char *stream = field(body, "\"stream\"");
    if (!stream || strncmp(stream, "true", 4)) {
        steps++;
        finished++;
        answer(c, "application/json", ANSWER);
        return;
    }
    const char *tokens = field(body, "\"max_tokens\"");
    if (!tokens || atol(tokens) < 1) tokens = field(body, "\"max_completion_tokens\"");
    c->total = tokens && atol(tokens) > 0 ? atol(tokens) : 10;
    c->burst = number_after(body, "burst=", 1);
    c->interval_us = (uint64_t)number_after(body, "interval_us=", 0);
    c->sent = 0;
    c->crc = 0;
    c->notes = notes;
    active++;
    char head[sizeof STREAM_HEAD + sizeof NOTED];
    int head_len = snprintf(head, sizeof head, "%s%s", STREAM_HEAD, notes ? NOTED : "\r\n");
    send_bytes(c, head, (size_t)head_len);
    c->due_us = now_us() + c->interval_us;
    if (!c->closed && !c->out_len) send_unit(c); /* the first token is there at once */
    schedule(c);
}

static void finish_all(void) {
    while (heap_len) {
        conn *c = heap[0];
        heap_remove(c);
        c->burst = c->total;
        schedule(c);
    }
}

static void handle(conn *c, const char *head, const char *body, int notes) {
    char line[512];
    size_t len = strcspn(head, "\r\n");
    snprintf(line, sizeof line, "%.*s", (int)len, head);
    if (!strncmp(line, "POST ", 5) && strstr(line, "/chat/completions")) {
        chat(c, body, notes);
    } else if (strstr(line, " /internal/watch")) {
        static const char WATCH_HEAD[] =
            "HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n";
        send_bytes(c, WATCH_HEAD, sizeof WATCH_HEAD - 1);
        if (c->closed) return;
        c->watching = 1;
        c->next_watch = watchers;
        watchers = c;
        send_watch_line(c);
    } else if (strstr(line, "/mock/finish")) {
        answer(c, "application/json", "{}");
        finish_all();
    } else if (strstr(line, "/mock/stats")) {
        char text[256];
        snprintf(text, sizeof text, "{\"requests\":%ld,\"active\":%ld,\"finished\":%ld,\"cancelled\":%ld}", requests, active,
                 finished, cancelled);
        answer(c, "application/json", text);
    } else if (strstr(line, "/v1/models")) {
        answer(c, "application/json",
               "{\"object\":\"list\",\"data\":[{\"id\":\"mock-model\",\"object\":\"model\",\"created\":1700000000,"
               "\"owned_by\":\"mock\",\"root\":\"mock-model\",\"parent\":null,\"max_model_len\":32768}]}");
    } else if (strstr(line, "/version")) {
        answer(c, "application/json", "{\"version\":\"0.0\"}");
    } else if (strstr(line, "model_info")) {
        answer(c, "application/json",
               "{\"model_path\":\"mock-model\",\"tokenizer_path\":\"mock-model\",\"is_generation\":true,"
               "\"served_model_name\":\"mock-model\",\"model_type\":\"llama\"}");
    } else if (strstr(line, "server_info")) {
        answer(c, "application/json",
               "{\"model_id\":\"mock-model\",\"model_path\":\"mock-model\",\"served_model_name\":\"mock-model\",\"tp_size\":1,"
               "\"dp_size\":1,\"disaggregation_mode\":\"null\",\"version\":\"0.0\",\"max_running_requests\":100000}");
    } else {
        answer(c, "text/plain", ""); /* health, and whatever else a router probes */
    }
}

static const char *header(const char *head, const char *name) {
    size_t len = strlen(name);
    for (const char *at = strstr(head, "\r\n"); at; at = strstr(at, "\r\n")) {
        at += 2;
        if (!strncasecmp(at, name, len)) {
            at += len;
            while (*at == ' ') at++;
            return at;
        }
    }
    return NULL;
}

/* Chunks joined in place: the length of the body, or -1 while it is not whole; *used is the length as it came. */
static long join_chunks(char *body, size_t len, size_t *used) {
    char *end = body + len, *from = body, *into = body;
    /* First whether it is whole: an incomplete body must stay as it is. */
    for (char *at = body;;) {
        char *eol = memmem(at, (size_t)(end - at), "\r\n", 2);
        if (!eol) return -1;
        unsigned long size = strtoul(at, NULL, 16);
        if ((size_t)(end - eol) < size + 4) return -1;
        at = eol + 2 + size + 2;
        if (!size) {
            *used = (size_t)(at - body);
            break;
        }
    }
    for (;;) {
        char *data = (char *)memmem(from, (size_t)(end - from), "\r\n", 2) + 2;
        unsigned long size = strtoul(from, NULL, 16);
        if (!size) return into - body;
        memmove(into, data, size);
        into += size;
        from = data + size + 2;
    }
}

/* Every whole request that has come; one whose answer is a stream stops here until the stream is done. */
static void parse(conn *c) {
    while (!c->closed && !c->total && !c->watching && c->in_len) {
        c->in[c->in_len] = 0;
        char *end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
        if (!end) return;
        char *body = end + 4;
        size_t head_len = (size_t)(body - c->in), came = c->in_len - head_len, used;
        end[2] = 0; /* the head as text, its last line end included */
        const char *length = header(c->in, "content-length:");
        const char *encoding = header(c->in, "transfer-encoding:");
        const char *connection = header(c->in, "connection:");
        const char *notes = header(c->in, "x-hotspare-stream:");
        int with_notes = notes && *notes == '1', close_after = connection && !strncasecmp(connection, "close", 5);
        long body_len;
        if (encoding) {
            body_len = join_chunks(body, came, &used);
        } else {
            body_len = length ? atol(length) : 0;
            used = (size_t)body_len;
            if (came < used) body_len = -1;
        }
        if (body_len < 0) {
            end[2] = '\r';
            return;
        }
        c->close_after = close_after;
        char kept = body[body_len];
        body[body_len] = 0;
        char *head_copy = need(strndup(c->in, head_len)), *body_copy = need(strndup(body, (size_t)body_len));
        body[body_len] = kept;
        c->in_len -= head_len + used;
        memmove(c->in, body + used, c->in_len);
        handle(c, head_copy, body_copy, with_notes);
        free(head_copy);
        free(body_copy);
    }
    if (c->close_after && !c->closed && !c->total && !c->out_len) close_conn(c);
}

static void readable(conn *c) {
    if (c->in_room - c->in_len < 4096) {
        c->in_room = c->in_room ? c->in_room * 2 : 16384;
        if (c->in_room > MAX_REQUEST) {
            close_conn(c);
            return;
        }
        c->in = need(realloc(c->in, c->in_room + 1));
    }
    ssize_t got = recv(c->fd, c->in + c->in_len, c->in_room - c->in_len, 0);
    if (got == 0 || (got < 0 && errno != EAGAIN)) {
        close_conn(c);
    } else if (got > 0) {
        c->in_len += (size_t)got;
        parse(c);
    }
}

static void writable(conn *c) {
    ssize_t took = send(c->fd, c->out + c->out_off, c->out_len - c->out_off, MSG_NOSIGNAL);
    if (took < 0) {
        if (errno != EAGAIN) close_conn(c);
        return;
    }
    c->out_off += (size_t)took;
    if (c->out_off < c->out_len) return;
    free(c->out);
    c->out = NULL;
    c->out_len = c->out_off = 0;
    want_writable(c, 0);
    if (c->total) schedule(c);
    else parse(c);
}

static void accept_all(int listener) {
    int one = 1, fd;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        conn *c = need(calloc(1, sizeof *c));
        c->fd = fd;
        c->heap_at = -1;
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    }
    if (errno != EAGAIN && errno != ECONNABORTED) perror("mock worker: accept");
}

static int listen_anywhere(void) {
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, BACKLOG) ||
        getsockname(listener, (struct sockaddr *)&address, &len)) {
        perror("mock worker: listen");
        exit(1);
    }
    port = ntohs(address.sin_port);
    return listener;
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    make_crc_tables();
    poller = epoll_create1(EPOLL_CLOEXEC);
    int listener = listen_anywhere();
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (poller < 0 || epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event)) {
        perror("mock worker: epoll");
        return 1;
    }
    printf("%d\n", port);
    fflush(stdout);
    static struct epoll_event events[1024];
    uint64_t beat_us = now_us() + BEAT_US;
    for (;;) {
        uint64_t now = now_us(), next = beat_us;
        if (heap_len && heap[0]->due_us < next) next = heap[0]->due_us;
        int timeout = ready_head || next <= now ? 0 : (int)((next - now + 999) / 1000);
        int count = epoll_wait(poller, events, 1024, timeout);
        for (int i = 0; i < count; i++) {
            conn *c = events[i].data.ptr;
            if (!c) {
                accept_all(listener);
                continue;
            }
            if (!c->closed && events[i].events & EPOLLOUT) writable(c);
            if (!c->closed && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(c);
        }
        for (size_t turn = ready_count; turn; turn--) { /* each ready stream once, in turn */
            conn *c = ready_head;
            ready_head = c->next_ready;
            if (!ready_head) ready_tail = NULL;
            ready_count--;
            c->queued = 0;
            if (c->closed || !c->total || c->out_len) continue;
            send_unit(c);
            schedule(c);
        }
        now = now_us();
        while (heap_len && heap[0]->due_us <= now) {
            conn *c = heap[0];
            heap_remove(c);
            c->due_us += c->interval_us;
            send_unit(c);
            schedule(c);
        }
        if (now >= beat_us) {
            beat_us = now + BEAT_US;
            for (conn *c = watchers, *next_one; c; c = next_one) {
                next_one = c->next_watch;
                send_watch_line(c);
            }
        }
        bury_the_dead();
    }
}

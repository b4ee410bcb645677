/* Starts a program of a measurement: on given cores, and told to end (SIGTERM: a master ends its own children, too) when
 * the process that measures is gone, however that happens.
 *
 *   launch PARENT_PID CORE[,CORE...] PROGRAM [ARGUMENT...]
 *
 * A program of its own because running Python between fork and exec would run other code's fork hooks with it, which
 * swallow the exception of a Ctrl-C that comes just then.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (argc < 4) {
        fputs("usage: launch PARENT_PID CORE[,CORE...] PROGRAM [ARGUMENT...]\n", stderr);
        return 2;
    }
    cpu_set_t cores;
    CPU_ZERO(&cores);
    for (char *core = strtok(argv[2], ","); core; core = strtok(NULL, ",")) CPU_SET((size_t)atoi(core), &cores);
    if (sched_setaffinity(0, sizeof cores, &cores)) {
        perror("launch: cores");
        return 126;
    }
    prctl(PR_SET_PDEATHSIG, SIGTERM, 0, 0, 0);
    if (getppid() != atoi(argv[1])) return 126; /* it is gone already */
    execvp(argv[3], argv + 3);
    fprintf(stderr, "launch: %s: %s\n", argv[3], strerror(errno));
    return 127;
}

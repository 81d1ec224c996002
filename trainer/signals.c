/* trainer/signals.c - the flag that SIGINT and SIGTERM set. Handlers run on the application's
 * thread (all others block signals) and call nothing that is not async-signal-safe. */
#include "trainer/signals.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

static volatile sig_atomic_t stop_requests;

static void on_signal(int number)
{
    (void)number;
    static const char first[] =
        "\nstoker: stopping after this step; a second signal ends at once\n";
    if (stop_requests++ > 0) _exit(130);
    if (write(STDERR_FILENO, first, sizeof first - 1) < 0) return;
}

void signals_install(void)
{
    struct sigaction act;
    memset(&act, 0, sizeof act);
    act.sa_handler = on_signal;
    act.sa_flags = SA_RESTART;
    sigaction(SIGINT, &act, NULL);
    sigaction(SIGTERM, &act, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a write beyond `ulimit -f` fails as one to a full disk */
}

bool signals_stop(void) { return stop_requests > 0; }

/* trainer/signals.c - the flag that SIGINT and SIGTERM set. Handlers run on the application's
 * thread (all others block signals) and call nothing that is not async-signal-safe. */
#include "trainer/signals.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

static _Atomic bool stop_asked;
static const char *_Atomic stop_text = "stopping"; /* before the handlers are there */

static bool put(const char *text) { return write(STDERR_FILENO, text, strlen(text)) >= 0; }

static void on_signal(int number)
{
    (void)number;
    if (atomic_exchange(&stop_asked, true)) _exit(130);
    if (put("\nstoker: ") && put(atomic_load(&stop_text)) && put("; a second signal ends at once\n")) return;
}

void signals_doing(const char *doing) { atomic_store(&stop_text, doing); }

const _Atomic bool *signals_install(const char *doing)
{
    struct sigaction act;
    signals_doing(doing);
    memset(&act, 0, sizeof act);
    act.sa_handler = on_signal;
    act.sa_flags = SA_RESTART;
    sigaction(SIGINT, &act, NULL);
    sigaction(SIGTERM, &act, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a write beyond `ulimit -f` fails as one to a full disk */
    return &stop_asked;
}

bool signals_stop(void) { return atomic_load(&stop_asked); }

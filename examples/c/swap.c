/* swap.c - a working set ten times larger than memory, with nothing but stoker.h.
 *
 * Items of odd sizes lie on disk. Each pass reads every item, checks every byte, changes it and
 * writes it back, in an order known ahead, so that the next items are read while this one is worked
 * on. Memory: the store's buffers and one item of our own, together --memory.
 *
 *     swap [--memory MIB] [--times N] [--passes N] [--durable] [--resume] [--keep] [FOLDER...]
 *
 * --memory 64, --times 10 (so many times the memory lie on disk), --passes 4. FOLDER: one per drive
 * (default: the current one). --durable: every pass is committed; a kill at any moment loses at
 * most the pass that was running, and --resume goes on from there. --keep: leave the last pass on
 * disk. Exit code 0: every byte was right; 1: not, or an error; 2: bad use. See README.md. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include <stdio.h>
#include <stdlib.h>
#include <stoker.h>
#include <string.h>
#include <time.h>

#define RUN_ID "5357415000000001" /* names our folders: a later process finds them by it */

struct swap {
    stk_store *s;
    uint32_t n_items;
    uint64_t *bytes, largest, total;
    uint8_t *work; /* one item, aligned for reads without a copy */
};
struct options {
    uint64_t memory, times, passes;
    bool durable, resume, keep;
    const char *folders[STK_NVME_MAX];
    int n_folders;
};

static uint64_t mix(uint64_t x) /* the finaliser of splitmix64 (Steele, Lea, Flood, 2014) */
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* What word k of an item is after a pass; the last bytes of an item are the first of a word. */
static uint64_t word_of(uint64_t item, uint64_t k, uint64_t pass)
{
    return mix(item << 40 | k) + pass * 0x9e3779b97f4a7c15u;
}

/* Checks that the item is as `pass` left it and makes it what pass + 1 leaves. True: it was. */
static bool work_on(struct swap *w, uint32_t item, uint64_t pass)
{
    uint64_t n = w->bytes[item], whole = n / 8, wrong = 0, v;
    for (uint64_t k = 0; k < whole; k++) {
        memcpy(&v, w->work + k * 8, 8);
        wrong += v != word_of(item, k, pass);
        v = word_of(item, k, pass + 1);
        memcpy(w->work + k * 8, &v, 8);
    }
    v = word_of(item, whole, pass);
    wrong += memcmp(w->work + whole * 8, &v, n % 8) != 0;
    v = word_of(item, whole, pass + 1);
    memcpy(w->work + whole * 8, &v, n % 8);
    if (pass > 0 && wrong > 0)
        fprintf(stderr, "item %u: %llu words are wrong\n", item, (unsigned long long)wrong);
    return pass == 0 || wrong == 0; /* before the first pass there is nothing */
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double memory_mib(const char *key) /* VmRSS: now, VmHWM: the most so far */
{
    char line[128];
    double kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0) kib = atof(line + strlen(key) + 1);
    if (f) fclose(f);
    return kib / 1024;
}

static int failed(struct swap *w, const char *what)
{
    fprintf(stderr, "swap: %s: %s\n", what, stk_store_error(w->s));
    stk_store_close(w->s, false); /* what is durable stays: --resume */
    return 1;
}

/* Up and down in turn: what the last pass ended with is still in the buffers. */
static uint32_t place(const struct swap *w, uint64_t pass, uint32_t k)
{
    return pass % 2 ? w->n_items - 1 - k : k;
}

static int run_pass(struct swap *w, uint64_t pass, bool last_look)
{
    uint32_t ahead = 0;
    for (uint32_t k = 0; k < w->n_items; k++) {
        uint32_t item = place(w, pass, k);
        if (pass > 0) {
            if (ahead <= k) ahead = k + 1;
            if (stk_store_get(w->s, item, w->work) != STK_OK) return failed(w, "get");
            while (ahead < w->n_items) { /* as far as there are buffers */
                stk_status st = stk_store_prefetch(w->s, place(w, pass, ahead));
                if (st == STK_BUSY) break;
                if (st != STK_OK) return failed(w, "prefetch");
                ahead++;
            }
        }
        if (!work_on(w, item, pass)) {
            stk_store_close(w->s, false);
            return 1;
        }
        if (!last_look && stk_store_put(w->s, item, w->work) != STK_OK) return failed(w, "put");
    }
    return 0;
}

static bool make_items(struct swap *w, const struct options *o)
{
    w->largest = (o->memory << 20) / 32;
    w->work = aligned_alloc(4096, w->largest);
    w->bytes = calloc(o->times * 64, sizeof *w->bytes);
    if (!w->work || !w->bytes) return false;
    while (w->total < (o->memory << 20) * o->times) { /* between a half and all of the largest */
        uint64_t n = w->largest - mix(w->n_items) % (w->largest / 2);
        if (w->n_items % 8 == 0) n &= ~(uint64_t)4095; /* these need no copy */
        w->bytes[w->n_items++] = n;
        w->total += n;
    }
    return true;
}

static stk_status open_store(struct swap *w, const struct options *o, bool resume)
{
    stk_store_config c;
    stk_store_config_init(&c, sizeof c);
    for (int i = 0; i < o->n_folders; i++) c.nvme[i] = o->folders[i];
    c.n_items = w->n_items;
    c.item_bytes = w->bytes;
    c.buffer_bytes = (o->memory << 20) - w->largest;
    c.durable = o->durable;
    c.adopt = resume;
    if (o->durable) memcpy(c.run_id, RUN_ID, sizeof RUN_ID);
    stk_status st = stk_store_open(&c, &w->s);
    if (st != STK_END) return st;
    stk_store_close(w->s, false); /* killed before its first commit: begin anew */
    return open_store(w, o, false);
}

static bool parse(struct options *o, int argc, char **argv)
{
    *o = (struct options){ .memory = 64, .times = 10, .passes = 4 };
    for (int i = 1; i < argc; i++) {
        uint64_t *number = !strcmp(argv[i], "--memory")   ? &o->memory
                           : !strcmp(argv[i], "--times")  ? &o->times
                           : !strcmp(argv[i], "--passes") ? &o->passes
                                                          : NULL;
        if (number) *number = i + 1 < argc ? strtoull(argv[++i], NULL, 10) : 0;
        else if (!strcmp(argv[i], "--durable")) o->durable = true;
        else if (!strcmp(argv[i], "--resume")) o->durable = o->resume = true;
        else if (!strcmp(argv[i], "--keep")) o->keep = true;
        else if (argv[i][0] == '-' || o->n_folders == STK_NVME_MAX) return false;
        else o->folders[o->n_folders++] = argv[i];
    }
    if (o->n_folders == 0) o->folders[o->n_folders++] = ".";
    return o->memory - 1 < (1u << 20) && o->times - 1 < 1000 && o->passes > 0;
}

static void report(const struct swap *w, double seconds, double start_mib)
{
    stk_store_stats t;
    stk_store_stats_read(w->s, &t);
    printf("read %.0f MB, wrote %.0f MB in %.1f s: %.0f MB/s; %llu of %llu gets found a buffer; "
           "waited %.1f s\n",
           (double)t.read_bytes / 1e6, (double)t.write_bytes / 1e6, seconds,
           (double)(t.read_bytes + t.write_bytes) / 1e6 / seconds, (unsigned long long)t.hits,
           (unsigned long long)(t.hits + t.misses), (double)t.wait_ns / 1e9);
    printf("peak memory %.1f MiB, %.1f of it since the start\n", memory_mib("VmHWM"),
           memory_mib("VmHWM") - start_mib);
}

static int run(struct swap *w, const struct options *o, double start_mib)
{
    if (!make_items(w, o)) return fprintf(stderr, "swap: no memory\n"), 1;
    if (open_store(w, o, o->resume) != STK_OK) return failed(w, "open");
    uint64_t pass = 0;
    if (o->resume && stk_store_durable(w->s, &pass, NULL, NULL) == STK_OK)
        printf("resumed after pass %llu\n", (unsigned long long)pass);
    printf("%u items, %.0f MiB in %llu MiB of memory; %s\n", w->n_items,
           (double)w->total / (1 << 20), (unsigned long long)o->memory, stk_store_describe(w->s));
    double begun = now();
    for (; pass < o->passes; pass++) {
        if (run_pass(w, pass, false) != 0) return 1;
        if (o->durable && stk_store_commit(w->s, pass + 1, NULL, 0) != STK_OK)
            return failed(w, "commit");
        printf("pass %llu done\n", (unsigned long long)pass + 1);
        fflush(stdout);
    }
    if (run_pass(w, pass, true) != 0) return 1; /* what the last one left */
    report(w, now() - begun, start_mib);
    stk_store_close(w->s, !o->keep);
    printf("every byte was right\n");
    return 0;
}

int main(int argc, char **argv)
{
    struct options o;
    struct swap w = { 0 };
    double start_mib = memory_mib("VmRSS");
    if (!parse(&o, argc, argv)) {
        fprintf(stderr, "usage: swap [--memory MIB] [--times N] [--passes N] [--durable] "
                        "[--resume] [--keep] [FOLDER...]\n");
        return 2;
    }
    int code = run(&w, &o, start_mib);
    free(w.bytes);
    free(w.work);
    return code;
}

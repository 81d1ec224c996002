/* tests/gpu/accept/tool.c - what accept.sh asks of a card before anything of this tree is built: which card, how fast
 * copies are, how much of its memory is taken while something runs.
 *
 * Knows CUDA's runtime only, so that its figures owe nothing to the product. One thread. Prints `name value` lines;
 * exit 3: there is no card that can be used, and one sentence on stderr says why.
 *
 *     tool card                 name, compute capability, memory, versions
 *     tool copies               bytes per second each way and both at once, pinned memory
 *     tool watch                takes its own context, prints `ready`, then, on the end of its input, the most memory
 *                               that others took on the card, by the driver's count (cudaMemGetInfo every 20 ms)
 *     tool tokens FILE N VOCAB  N random tokens as uint16
 */
#include <cuda_runtime_api.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NO_CARD = 3 };

static int no_card(const char *call, cudaError_t e)
{
    int driver = 0, runtime = 0;
    (void)cudaDriverGetVersion(&driver);
    (void)cudaRuntimeGetVersion(&runtime);
    if (driver == 0)
        fprintf(stderr, "no NVIDIA driver is loaded (%s: %s): run this on a machine with a card and its driver\n", call,
                cudaGetErrorString(e));
    else if (driver < runtime)
        fprintf(stderr, "the driver is for CUDA %d.%d, this toolkit is %d.%d (%s: %s): install a newer driver\n",
                driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10, call, cudaGetErrorString(e));
    else
        fprintf(stderr, "no card can be used (%s: %s): see nvidia-smi and CUDA_VISIBLE_DEVICES\n", call,
                cudaGetErrorString(e));
    return NO_CARD;
}

/* Calls of set-up: their failure is that of the card. */
#define TRY(call)                                           \
    do {                                                    \
        cudaError_t try_e = (call);                         \
        if (try_e != cudaSuccess) return no_card(#call, try_e); \
    } while (0)

static int card(void)
{
    int n = 0, driver = 0, runtime = 0;
    struct cudaDeviceProp p;
    size_t free_bytes = 0, total = 0;
    TRY(cudaGetDeviceCount(&n));
    if (n == 0) return no_card("cudaGetDeviceCount", cudaErrorNoDevice);
    TRY(cudaGetDeviceProperties(&p, 0));
    TRY(cudaSetDevice(0));
    TRY(cudaMemGetInfo(&free_bytes, &total));
    TRY(cudaDriverGetVersion(&driver));
    TRY(cudaRuntimeGetVersion(&runtime));
    printf("name %s\ncapability %d%d\ntotal_bytes %zu\nfree_bytes %zu\ndriver %d.%d\nruntime %d.%d\n", p.name, p.major,
           p.minor, total, free_bytes, driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    return 0;
}

/* --- copies: events around eight copies of 256 MiB, the best of three */

enum { COPIES = 8, ROUNDS = 3 };
#define COPY_BYTES ((size_t)256 << 20)

struct copies {
    void *host[2], *dev[2];
    cudaStream_t in, out;
    cudaEvent_t begin, end_in, end_out;
};

static int copies_round(struct copies *c, int in, int out, double *seconds)
{
    float a = 0, b = 0;
    TRY(cudaEventRecord(c->begin, c->in));
    TRY(cudaStreamWaitEvent(c->out, c->begin, 0));
    for (int i = 0; i < COPIES; i++) {
        if (in) TRY(cudaMemcpyAsync(c->dev[0], c->host[0], COPY_BYTES, cudaMemcpyHostToDevice, c->in));
        if (out) TRY(cudaMemcpyAsync(c->host[1], c->dev[1], COPY_BYTES, cudaMemcpyDeviceToHost, c->out));
    }
    TRY(cudaEventRecord(c->end_in, c->in));
    TRY(cudaEventRecord(c->end_out, c->out));
    TRY(cudaDeviceSynchronize());
    TRY(cudaEventElapsedTime(&a, c->begin, c->end_in));
    TRY(cudaEventElapsedTime(&b, c->begin, c->end_out));
    *seconds = (double)(a > b ? a : b) / 1e3;
    return 0;
}

static int copies(void)
{
    static const char *const names[] = { "in", "out", "both" };
    struct copies c;
    for (int i = 0; i < 2; i++) {
        TRY(cudaHostAlloc(&c.host[i], COPY_BYTES, cudaHostAllocDefault));
        TRY(cudaMalloc(&c.dev[i], COPY_BYTES));
        memset(c.host[i], i + 1, COPY_BYTES);
        TRY(cudaMemset(c.dev[i], i, COPY_BYTES));
    }
    TRY(cudaStreamCreateWithFlags(&c.in, cudaStreamNonBlocking));
    TRY(cudaStreamCreateWithFlags(&c.out, cudaStreamNonBlocking));
    TRY(cudaEventCreate(&c.begin));
    TRY(cudaEventCreate(&c.end_in));
    TRY(cudaEventCreate(&c.end_out));
    for (int k = 0; k < 3; k++) {
        double best = 0;
        for (int i = 0; i < ROUNDS; i++) {
            double s = 0, bytes = (double)COPY_BYTES * COPIES * (k == 2 ? 2 : 1);
            int rc = copies_round(&c, k != 1, k != 0, &s);
            if (rc) return rc;
            if (bytes / s > best) best = bytes / s;
        }
        printf("%s %.0f\n", names[k], best);
    }
    return 0;
}

/* --- memory: this process's own context is there before and does not change */

static int watch(void)
{
    size_t free_bytes = 0, total = 0, first = 0, least = 0;
    struct pollfd in = { .fd = 0, .events = POLLIN };
    TRY(cudaSetDevice(0));
    TRY(cudaFree(NULL));
    TRY(cudaMemGetInfo(&first, &total));
    least = first;
    printf("ready\n");
    fflush(stdout);
    while (poll(&in, 1, 20) == 0) {
        TRY(cudaMemGetInfo(&free_bytes, &total));
        if (free_bytes < least) least = free_bytes;
    }
    printf("most_bytes %zu\n", first - least);
    return 0;
}

static int tokens(const char *path, uint64_t n, uint64_t vocab)
{
    FILE *f = fopen(path, "wb");
    uint64_t x = 0x9e3779b97f4a7c15u;
    if (!f || vocab == 0) {
        fprintf(stderr, "%s cannot be written\n", path);
        return 1;
    }
    for (uint64_t i = 0; i < n; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17; /* Marsaglia 2003 */
        uint16_t t = (uint16_t)((x >> 32) % vocab);
        fwrite(&t, sizeof t, 1, f);
    }
    return fclose(f) == 0 ? 0 : 1;
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "card") == 0) return card();
    if (strcmp(what, "copies") == 0) return copies();
    if (strcmp(what, "watch") == 0) return watch();
    if (strcmp(what, "tokens") == 0 && argc == 5)
        return tokens(argv[2], strtoull(argv[3], NULL, 10), strtoull(argv[4], NULL, 10));
    fprintf(stderr, "tool: card, copies, watch, or tokens FILE N VOCAB\n");
    return 2;
}

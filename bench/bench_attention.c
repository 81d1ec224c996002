/* bench/bench_attention.c - time of attention forward and backward on the host device, one line of
 * JSON. Arguments: n_seq seq heads kv_heads head_dim threads bf16(0/1) (defaults: 2 512 16 8 64 2
 * 0). STOKER_MAX_ISA lowers the instruction set. Median of 9 runs. */
#include "gpu/host/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void *filled(uint64_t n, bool bf16)
{
    void *p = NULL;
    if (posix_memalign(&p, 64, n * 4)) exit(1);
    for (uint64_t i = 0; i < n; i++) {
        float x = (float)((i * 2654435761u >> 7) & 0xffff) / 32768.0f - 1.0f;
        if (bf16)
            ((uint16_t *)p)[i] =
                (uint16_t)((i & 1 ? 0x8000u : 0) | (0x3f00u + (i * 40503u >> 5 & 0x7f)));
        else ((float *)p)[i] = x;
    }
    return p;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    uint64_t v[7] = { 2, 512, 16, 8, 64, 2, 0 };
    for (int i = 1; i < argc && i <= 7; i++) v[i - 1] = strtoull(argv[i], NULL, 0);
    struct host_ctx c = { (uint32_t)v[5], cpu_isa_best(), false };
    struct ops_attention a = { .n_seq = v[0],
                               .seq = v[1],
                               .heads = v[2],
                               .kv_heads = v[3],
                               .head_dim = v[4],
                               .q_stride = v[2] * v[4],
                               .k_stride = v[3] * v[4],
                               .v_stride = v[3] * v[4],
                               .o_stride = v[2] * v[4],
                               .at = v[6] ? OPS_BF16 : OPS_F32,
                               .scale = 0.125f };
    uint64_t rows = v[0] * v[1], qn = rows * a.q_stride, kn = rows * a.k_stride;
    a.q = filled(qn, v[6]), a.k = filled(kn, v[6]), a.v = filled(kn, v[6]),
    a.d_o = filled(qn, v[6]);
    a.o = filled(qn, v[6]), a.dq = filled(qn, v[6]), a.dk = filled(kn, v[6]),
    a.dv = filled(kn, v[6]);
    a.lse = filled(rows * a.heads, false);
    a.first_key = calloc(rows, sizeof(int32_t));
    a.scratch.size_bytes = host_attention_scratch(&c, &a, true);
    a.scratch.base = malloc(a.scratch.size_bytes);
    memset(a.scratch.base, 0, a.scratch.size_bytes);
    double f[9], b[9];
    for (int i = -1; i < 9; i++) {
        double t0 = now_ms();
        host_attention_forward(&c, &a);
        double t1 = now_ms();
        host_attention_backward(&c, &a);
        if (i >= 0) f[i] = t1 - t0, b[i] = now_ms() - t1;
    }
    qsort(f, 9, sizeof *f, compare), qsort(b, 9, sizeof *b, compare);
    double pairs =
        (double)v[0] * (double)v[2] * (double)v[1] * (double)(v[1] + 1) / 2 * (double)v[4] * 2;
    printf("{\"bench\":\"attention\",\"n_seq\":%d,\"seq\":%d,\"heads\":%d,\"kv_heads\":%d,\"head_"
           "dim\":%d,\"threads\":%d,"
           "\"at\":\"%s\",\"isa\":\"%s\",\"reps\":9,\"forward_ms\":%.2f,\"backward_ms\":%.2f,\"min_"
           "ms\":%.2f,"
           "\"gflop_per_s\":%.1f}\n",
           (int)v[0], (int)v[1], (int)v[2], (int)v[3], (int)v[4], (int)v[5], v[6] ? "bf16" : "f32",
           cpu_isa_name(c.isa), f[4], b[4], f[0] + b[0], pairs * 7 / (f[4] + b[4]) * 1e-6);
    return 0;
}

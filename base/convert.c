/* base/convert.c - choosing a variant of the conversions between fp32, bf16, fp16 and the split
 * master.
 *
 * Owns the table of variants (from convert_kernels.inc). Must not know chunks, tensors or the
 * engine. The processor is asked at each call (a cached flag and one environment variable), which
 * is nothing beside a chunk. Pure; any thread. */
#include "base/convert_variants.h"

#define CONVERT_ROW_AVX2(operation, parameters) .operation = convert_##operation##__avx2,
#define CONVERT_ROW_SCALAR(operation, parameters) .operation = convert_##operation##__scalar,
#define CONVERT_ROW_avx2 CONVERT_OPERATIONS(CONVERT_ROW_AVX2)
#define CONVERT_ROW_scalar CONVERT_OPERATIONS(CONVERT_ROW_SCALAR)
#define CONVERT_ROW_avx512                                                                       \
    .grad_bf16 = convert_grad_bf16__avx512, .grad_fp16 = convert_grad_fp16__avx2,                \
    .split = convert_split__avx2, .join = convert_join__avx2,                                    \
    .bf16_to_f32 = convert_bf16_to_f32__avx2, .fp16_to_f32 = convert_fp16_to_f32__avx2,          \
    .f32_to_bf16 = convert_f32_to_bf16__avx2, .f32_to_fp16 = convert_f32_to_fp16__avx2,
#define CONVERT_KERNEL(suffix, isa_) { .name = #suffix, .isa = isa_, CONVERT_ROW_##suffix },
const struct convert_kernel convert_kernels[] = {
#include "base/convert_kernels.inc"
    { .name = NULL },
};

static const struct convert_kernel *convert_pick(void)
{
    enum cpu_isa best = cpu_isa_best();
    const struct convert_kernel *k = convert_kernels;
    while (k->isa > best) k++; /* the scalar one ends the list */
    return k;
}

/* The gradient casts multiply in floating point: under a fixed mode, so that the caller's does not
 * change their bits. */
void convert_grad_bf16(const float *acc, uint16_t *out, uint64_t n, float scale,
                       struct convert_sum *sum)
{
    uint32_t saved = cpu_ftz_enter();
    convert_pick()->grad_bf16(acc, out, n, scale, sum);
    cpu_ftz_leave(saved);
}

void convert_grad_fp16(const float *acc, uint16_t *out, uint64_t n, float scale,
                       struct convert_sum *sum)
{
    uint32_t saved = cpu_ftz_enter();
    convert_pick()->grad_fp16(acc, out, n, scale, sum);
    cpu_ftz_leave(saved);
}

void convert_split(const float *master, uint16_t *param, int16_t *low, uint64_t n)
{
    convert_pick()->split(master, param, low, n);
}

void convert_join(const uint16_t *param, const int16_t *low, float *master, uint64_t n)
{
    convert_pick()->join(param, low, master, n);
}

void convert_bf16_to_f32(const uint16_t *in, float *out, uint64_t n)
{
    convert_pick()->bf16_to_f32(in, out, n);
}

void convert_fp16_to_f32(const uint16_t *in, float *out, uint64_t n)
{
    convert_pick()->fp16_to_f32(in, out, n);
}

void convert_f32_to_bf16(const float *in, uint16_t *out, uint64_t n)
{
    convert_pick()->f32_to_bf16(in, out, n);
}

void convert_f32_to_fp16(const float *in, uint16_t *out, uint64_t n)
{
    convert_pick()->f32_to_fp16(in, out, n);
}

/* gpu/host/operand.c - operands of products: the right one in place, converted, or packed in the
 * layout that the library multiplies fastest; the left one transposed.
 *
 * Owns the choice, which follows from shapes, types and the library only. A packed operand costs one
 * pass over it, in which its type changes too; without it the library makes that pass itself in every
 * call, more slowly. Other operands must lie close together (no gaps between rows), or the library
 * (2.6.3) takes a slower way. Must not know what is multiplied. Runs on a stream's lane; OpenMP inside. */
#include "gpu/host/host_impl.h"

/* No layout has larger blocks. */
#define RIGHT_K_BLOCK 32
#define RIGHT_N_BLOCK 64

static uint64_t round_up(uint64_t x, uint64_t to) { return (x + to - 1) / to * to; }

uint64_t host_right_room(const struct host_right *r)
{
    return round_up(r->k, RIGHT_K_BLOCK) * round_up(r->n, RIGHT_N_BLOCK) * ops_dtype_bytes(r->to);
}

void host_right_plan(struct host_job *j, struct host_right *r, struct host_product *p)
{
    struct host_product packed = *p;
    packed.n = r->n;
    packed.k = r->k;
    packed.packed = 1;
    packed.ldb = packed.tb = 0;
    r->layout = (struct host_layout){ 0, 0 };
    if (packed.src == OPS_BF16 && !packed.ta && host_gemm_fits(&j->h->ctx, packed.k)) {
        packed.own = 1;
        r->layout = HOST_GEMM_LAYOUT;
        *p = packed;
        return;
    }
    if (j->st == STK_OK && j->dry) {
        uint64_t pad = 0;
        j->st = host_matmul_prepare(j->h->matmul, &packed, &pad, j->err);
    }
    if (j->st == STK_OK) j->st = host_matmul_layout(j->h->matmul, &packed, &r->layout, j->err);
    *p = packed;
    if (r->layout.k_block) return;
    r->in_place = r->from == r->to;
    p->packed = 0;
    p->tb = r->transposed;
    p->ldb = r->in_place ? r->ld : r->transposed ? r->k : r->n;
}

const void *host_right_make(struct host_job *j, const struct host_right *r, const void *src,
                            void *buf)
{
    if (j->dry || j->st != STK_OK) return NULL;
    if (r->layout.k_block) {
        const struct host_pack a = { .k = r->k,
                                     .n = r->n,
                                     .ld = r->ld,
                                     .from = r->from,
                                     .to = r->to,
                                     .transposed = r->transposed,
                                     .layout = r->layout,
                                     .src = src,
                                     .dst = buf };
        host_pack(&j->h->ctx, &a);
        return buf;
    }
    if (r->in_place) return src;
    const uint64_t rows = r->transposed ? r->n : r->k, cols = r->transposed ? r->k : r->n;
    host_convert(j, src, r->from, r->ld, buf, r->to, cols, rows, cols);
    return buf;
}

void host_left_transpose(struct host_job *j, const void *src, enum ops_dtype from, uint64_t ld,
                         uint64_t rows, uint64_t cols, void *dst, enum ops_dtype to)
{
    if (j->dry || j->st != STK_OK) return;
    const struct host_transpose a = { .rows = rows,
                                      .cols = cols,
                                      .ld = ld,
                                      .dst_ld = rows,
                                      .from = from,
                                      .to = to,
                                      .src = src,
                                      .dst = dst };
    host_transpose(&j->h->ctx, &a);
}

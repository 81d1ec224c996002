/* gpu/cuda/cuda_attention.c - which attention a shape gets, and the scratch of own tiles.
 *
 * Owns the choice (cuda_attention_choose), which is by shape and card alone, so that every visit of
 * a shape has the same bits: cuDNN's where it has any, else own tiles. Must not know streams. In the
 * stream's producer. */
#include "gpu/cuda/cuda_impl.h"

#define TILES_HEAD_DIM_MAX 256

enum cuda_attention_way cuda_attention_choose(struct cuda_job *j, const struct ops_attention *a,
                                              bool backward)
{
    return cuda_dnn_takes(j, a, backward) ? CUDA_ATTENTION_DNN : CUDA_ATTENTION_TILES;
}

static void attention_tiles(struct cuda_job *j, const struct ops_attention *a, bool backward)
{
    if (a->head_dim > TILES_HEAD_DIM_MAX) {
        j->st =
            stk_error_set(j->err, STK_ERR_UNSUPPORTED, 0,
                          "device cuda: attention heads of %llu elements: at most %d are possible; "
                          "use --device host",
                          (unsigned long long)a->head_dim, TILES_HEAD_DIM_MAX);
        return;
    }
    const uint64_t need = cuda_attention_scratch(a, backward);
    struct ops_attention b = *a;
    b.scratch.base = need ? cuda_take(j, need) : NULL;
    b.scratch.size_bytes = need;
    if (j->dry || j->st != STK_OK) return;
    cudaError_t e = backward ? cuda_attention_backward(j->s->queue, &b)
                             : cuda_attention_forward(j->s->queue, &b);
    cuda_job_check(j, e, "kernel launch");
}

void cuda_attention(struct cuda_job *j, const struct ops_attention *a, bool backward)
{
    switch (cuda_attention_choose(j, a, backward)) {
    case CUDA_ATTENTION_TILES: attention_tiles(j, a, backward); break;
    case CUDA_ATTENTION_DNN: cuda_dnn_attention(j, a, backward);
    }
}

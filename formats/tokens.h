/* formats/tokens.h - token files: a safetensors with `input_ids` (any integer type), optionally
 * `loss_mask` (U8, 1 = this token is a target) and `document_offsets` (I64: strictly ascending
 * start offsets, the first is 0; positions restart, attention does not cross, the first token of a
 * document is never a target), or a plain `.bin` of little-endian uint16.
 *
 * Windows are consecutive, disjoint runs of `seq` tokens; a last short one is dropped. Window w,
 * token t (0-based): the logits at t predict token t + 1; so target[t] = ids[t + 1] for t < seq - 1
 * unless the mask of t + 1 is 0 or t + 1 begins a document: then -1; target[seq - 1] = -1.
 * position[t] counts from the later of the window's start and its document's start; first_key[t] is
 * that start (offset inside the window). Read with pread as needed: memory does not grow with the
 * file. Ids are checked against the vocabulary at open (one streaming pass). */
#ifndef FORMATS_TOKENS_H
#define FORMATS_TOKENS_H

#include "base/status.h"

struct tokens;
/* vocab 0: not checked. Errors: empty, no input_ids, wrong dtypes or lengths, offsets not ascending
 * or out of range, id beyond the vocabulary (names position). */
stk_status tokens_open(const char *path, uint32_t vocab, struct tokens **out,
                       struct stk_error *err);
void tokens_close(struct tokens *t);
uint64_t tokens_count(const struct tokens *t);
uint64_t tokens_documents(const struct tokens *t);
uint64_t tokens_windows(const struct tokens *t, uint64_t seq);
/* Sequence longer than the data: STK_ERR_CONFIG with both numbers. */
stk_status tokens_check_seq(const struct tokens *t, uint64_t seq, struct stk_error *err);
/* Fills arrays of `seq` entries each for window w; n_targets (may be NULL): targets in it. */
stk_status tokens_window(struct tokens *t, uint64_t seq, uint64_t w, int32_t *ids, int32_t *targets,
                         int32_t *position, int32_t *first_key, uint64_t *n_targets,
                         struct stk_error *err);
uint64_t tokens_hash(const struct tokens *t); /* identifies the data in a checkpoint: over ids, mask
                                               * and offsets */

/* The order of windows: epoch e visits a seeded shuffle of all windows. Position p in [0, ...)
 * counts windows over all epochs. Regular memory: one u32 a window. */
struct token_order;
stk_status token_order_new(uint64_t n_windows, uint64_t seed, struct token_order **out,
                           struct stk_error *err);
void token_order_free(struct token_order *o);
uint64_t token_order_at(struct token_order *o, uint64_t p); /* window index; pure in (seed, p) */

#endif

/* offload/adam_device.h - between a chunk's update and ops_adam of gpu/ops.h, for state that lies in the
 * device's memory: which spans have which coefficients, and the step itself for devices that compute on
 * this machine's cores.
 *
 * Any thread; nothing is allocated; nobody waits. */
#ifndef OFFLOAD_ADAM_DEVICE_H
#define OFFLOAD_ADAM_DEVICE_H

#include "gpu/ops.h"
#include "offload/adam_chunk.h"

/* The step over elements [begin, end) of the arrays: for dev_cfg.adam. The best kernel of this processor;
 * all have the same bits. */
void adam_device_run(const struct ops_adam *a, uint64_t begin, uint64_t end);

/* Most spans that a chunk's step can have: its tensors' pieces. */
uint32_t adam_device_spans_max(const struct stk_layout *l, const struct stk_chunk *c);
/* The step of a whole chunk: arguments with the arrays' places in their states (`opt` holds low or master,
 * exp_avg, exp_avg_sq, as in struct adam_chunk; moments in fp32 only) and the spans, of which `spans` has
 * room for adam_device_spans_max. n_spans 0: nothing is due. */
void adam_device_chunk(const struct stk_layout *l, const struct stk_chunk *c,
                       const struct adam_coefs *coefs, void *param, void *opt, const void *grad,
                       struct ops_adam_span *spans, struct ops_adam *out);

#endif

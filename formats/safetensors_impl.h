/* formats/safetensors_impl.h - what safetensors.c and safetensors_set.c share; nobody else
 * includes it. */
#ifndef FORMATS_SAFETENSORS_IMPL_H
#define FORMATS_SAFETENSORS_IMPL_H

#include "formats/safetensors.h"

#define ST_HEADER_MAX 100000000ull /* the reference reader's own limit */

/* Marks every tensor of f as lying in shard `file` of a set. */
void st_file_number(struct st_file *f, uint32_t file);
const char *st_file_path(const struct st_file *f);
/* Sorts pointers to tensors by name, and finds one in such an array. */
void st_sort_by_name(const struct st_tensor **v, uint32_t n);
const struct st_tensor *st_find_by_name(const struct st_tensor *const *v, uint32_t n,
                                        const char *name);

#endif

/* trainer/hf_impl.h - what hf_out.c and hf_folder.c share. */
#ifndef TRAINER_HF_IMPL_H
#define TRAINER_HF_IMPL_H

#include "trainer/hf_out.h"

/* An empty folder at `path`; what was there is removed. */
stk_status hf_make_folder(const char *path, struct stk_error *err);
/* Tokenizer, chat template and generation files. */
stk_status hf_copy_files(const char *from, const char *to, void *buf, uint64_t buf_bytes,
                         struct stk_error *err);

#endif

/* tests/gpu/simt/memory.cpp - first version: registered memory, no checks yet. */
#include "simt_impl.h"
#include <cstdio>
#include <cstdlib>
#include <cstring>

void memory_access(uintptr_t, size_t, enum memory_kind, const void *) {}
void memory_block_begin(void) {}
void memory_block_end(void) {}
extern "C" {
void simt_checks(unsigned) {}
bool simt_register(void *, size_t, const char *, unsigned) { return true; }
void simt_unregister(void *) {}
void *simt_alloc(size_t n, const char *)
{
    void *p = aligned_alloc(256, (n + 511) & ~(size_t)255);
    if (!p) abort();
    memset(p, 0xff, n);
    return p;
}
void simt_free(void *p) { free(p); }
void simt_written(const void *, size_t) {}
void simt_poison(void *, size_t) {}
uint64_t simt_unwritten_bytes(const void *, size_t) { return 0; }
bool simt_access(const char *, const void *, size_t, bool) { return true; }
void simt_atomic_check(const void *, size_t) {}
void *simt_memcpy(void *d, const void *s, size_t n) { return memcpy(d, s, n); }
void *simt_memmove(void *d, const void *s, size_t n) { return memmove(d, s, n); }
void *simt_memset(void *d, int v, size_t n) { return memset(d, v, n); }
}

/* tests/gpu/simt/memory_impl.h - a range of memory and what is known of its bytes; shared by memory.cpp and
 * order.cpp only. */
#ifndef TESTS_SIMT_MEMORY_IMPL_H
#define TESTS_SIMT_MEMORY_IMPL_H

#include "simt_impl.h"
#include <memory>
#include <string>
#include <vector>

#define MEMORY_PAGE_BITS 10 /* 1 KiB of memory has its order in one object */

struct memory_page; /* order.cpp */
struct memory_page_delete { void operator()(memory_page *p) const; };

struct memory_range {
    uintptr_t base, end;
    std::string name;
    unsigned flags;                 /* SIMT_WRITTEN, SIMT_READ_ONLY */
    bool shared;                    /* of one block, not of the device */
    uint32_t block;                 /* simt_where.block_first of the last block that used it (shared) */
    std::vector<uint64_t> written;  /* a bit a byte, from base on */
    std::vector<std::unique_ptr<memory_page, memory_page_delete>> pages; /* by address >> MEMORY_PAGE_BITS */
    size_t size() const { return end - base; }
};

/* Judges the order of this access of the running thread against earlier ones, and remembers it. */
void order_access(memory_range &r, uintptr_t p, size_t n, enum memory_kind k, const void *pc);

#endif

/* nvme/io_sim_disk.h - the medium of the simulated disk: files of sparse pages. Private to
 * io_sim*.c; one lane at a time. */
#ifndef NVME_IO_SIM_DISK_H
#define NVME_IO_SIM_DISK_H

#include "nvme/io_sim.h"

#define SIM_PAGE_BYTES 4096u

enum sim_fault {
    SIM_READ_ERROR,
    SIM_WRITE_ERROR,
    SIM_SHORT,
    SIM_NO_SPACE,
    SIM_FLIP_BIT,
    SIM_ROT_BIT,
    SIM_MISDIRECT,
    SIM_LOST_WRITE,
    SIM_LOST_COMPLETION,
    SIM_LATE,
    SIM_REORDER,
    SIM_FAULT_N
};

struct sim_page {
    uint8_t *medium;   /* what a read returns; NULL: zeros */
    uint8_t *pristine; /* what writes asked for, kept from the first damage on; NULL: as medium */
    /* content at the last flush, kept from the first write after it on; NULL: zeros */
    uint8_t *durable;
    bool dirty;        /* durable holds */
};

struct sim_file {
    char *path;
    uint64_t size_bytes, n_pages;
    struct sim_page *pages;
    struct sim_file *next;
};

struct io_sim_disk {
    uint64_t capacity_bytes, used_bytes, requests;
    uint64_t faults[SIM_FAULT_N];
    struct sim_file *files;
};

/* Which copies a write changes: a lost write changes only what should be there, a misdirected one
 * only what is there. */
enum sim_copy { SIM_BOTH, SIM_MEDIUM, SIM_PRISTINE };

struct sim_file *sim_file_find(const struct io_sim_disk *d, const char *path);
void sim_read(const struct sim_file *f, uint64_t offset_bytes, uint8_t *buf, uint64_t size_bytes);
/* False: no memory; what was written so far stays. The range lies inside the file. */
bool sim_write(struct sim_file *f, uint64_t offset_bytes, const uint8_t *buf, uint64_t size_bytes,
               enum sim_copy copy);
bool sim_flip_bit(struct sim_file *f, uint64_t offset_bytes, uint32_t bit); /* medium only */
void sim_flush(struct sim_file *f);

#endif

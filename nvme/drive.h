/* nvme/drive.h - what is known about the drive under a path: its name, link, NUMA node, wear.
 *
 * Everything is read from sysfs and, for an NVMe drive, from its SMART log (the admin command Get
 * Log Page 02h of the NVM Express base specification, through the kernel's NVME_IOCTL_ADMIN_CMD;
 * wants CAP_SYS_ADMIN or the device's permission). What cannot be read is left unknown, with the
 * reason in words: nothing here is an error, and no figure is guessed. A path on RAID or LVM is
 * described by the first drive under it, and says so.
 *
 * Thread: any; blocks for milliseconds. No global state. */
#ifndef NVME_DRIVE_H
#define NVME_DRIVE_H

#include "base/status.h"

struct drive_facts {
    uint64_t device_id;          /* dev_t of the file system: equal for paths that share it */
    char device[64];             /* "nvme0n1", "loop3"; "": no block device (tmpfs, NFS) */
    char under[64];              /* the whole drive below a partition, RAID or LVM; equal for paths
                                  * that share a drive */
    char model[64];              /* "" unknown */
    char file_system[32];        /* "ext4" */
    int numa_node;               /* -1: unknown or the machine has one */
    bool rotational;
    double link_bytes_per_s;     /* PCIe speed x width, payload after encoding; 0: unknown */
    /* SMART */
    bool smart;                  /* the fields below hold */
    char smart_why[160];         /* else why not, and what would allow it */
    uint32_t percentage_used;    /* of the vendor's endurance estimate; may exceed 100 */
    double written_bytes;        /* host writes in the drive's life (data units x 512,000) */
    double endurance_bytes;      /* written_bytes * 100 / percentage_used when percentage_used >= 1:
                                  * an estimate, labelled so; 0: unknown */
    int temperature_c;           /* composite */
    uint32_t warning_temperature_c; /* 0: unknown */
    bool critical_warning;
};

/* Fills *out for an existing file or folder. STK_ERR_IO: the path cannot be looked up at all.
 * `sysfs`: "/sys", or a test's tree. */
stk_status drive_facts_read(const char *path, const char *sysfs, struct drive_facts *out,
                            struct stk_error *err);

#endif

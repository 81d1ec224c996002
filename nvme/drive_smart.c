/* nvme/drive_smart.c - wear and temperature from an NVMe drive's SMART / Health log.
 *
 * Layout: NVM Express Base Specification 2.0, 5.16.1.3 (Get Log Page, identifier 02h) and 5.17.2.1
 * (Identify Controller). The kernel passes the admin command on for who may (CAP_SYS_ADMIN); a
 * refusal is a fact like any other. Any thread; blocks for milliseconds; reads only. */
#include "nvme/drive_impl.h"
#include "base/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/nvme_ioctl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#define OP_GET_LOG 0x02u
#define OP_IDENTIFY 0x06u
#define LOG_SMART 0x02u
#define IDENTIFY_CONTROLLER 0x01u
#define ALL_NAMESPACES 0xffffffffu
#define KELVIN 273
#define DATA_UNIT_BYTES 512000.0 /* thousands of 512-byte units */

static uint32_t le16(const uint8_t *p) { return (uint32_t)p[0] | (uint32_t)p[1] << 8; }

/* A 128-bit counter, rounded. */
static double le128(const uint8_t *p)
{
    double v = 0;
    for (int i = 15; i >= 0; i--) v = v * 256 + p[i];
    return v;
}

static bool all_zero(const uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i]) return false;
    return true;
}

bool drive_smart_decode(const uint8_t log[DRIVE_SMART_BYTES], struct drive_facts *out)
{
    if (all_zero(log, DRIVE_SMART_BYTES)) {
        out->smart = false;
        snprintf(out->smart_why, sizeof out->smart_why, "the drive answered with an empty log");
        return false;
    }
    out->smart = true;
    out->critical_warning = log[0] != 0;
    out->temperature_c = (int)le16(log + 1) - KELVIN;
    out->percentage_used = log[5];
    out->written_bytes = le128(log + 48) * DATA_UNIT_BYTES;
    out->endurance_bytes = 0;
    if (out->percentage_used >= 1)
        out->endurance_bytes = out->written_bytes * 100 / out->percentage_used;
    return true;
}

void drive_identify_decode(const uint8_t id[DRIVE_IDENTIFY_BYTES], struct drive_facts *out)
{
    uint32_t kelvin = le16(id + 266); /* WCTEMP; 0: not reported */
    out->warning_temperature_c = kelvin > KELVIN ? kelvin - KELVIN : 0;
}

/* 0, an errno value, or -1 with the drive's own status refused. */
static int admin(int fd, uint32_t opcode, uint32_t nsid, uint32_t cdw10, void *buf, uint32_t n)
{
    struct nvme_admin_cmd cmd = { .opcode = (uint8_t)opcode,
                                  .nsid = nsid,
                                  .addr = (uint64_t)(uintptr_t)buf,
                                  .data_len = n,
                                  .cdw10 = cdw10 };
    int rc;
    do rc = ioctl(fd, NVME_IOCTL_ADMIN_CMD, &cmd);
    while (rc < 0 && errno == EINTR);
    return rc < 0 ? errno : rc > 0 ? -1 : 0;
}

/* /dev/NAME as the drive that sysfs means; -1 with the reason. */
static int open_drive(const char *name, const char *dev_number, struct drive_facts *out)
{
    char path[96], number[32];
    struct stat st;
    snprintf(path, sizeof path, "/dev/%.64s", name);
    int fd = sys_open(path, O_RDONLY | O_NONBLOCK, 0);
    if (fd < 0) {
        snprintf(out->smart_why, sizeof out->smart_why, "%.64s cannot be opened: %s%s", path,
                 strerror(errno),
                 errno == EACCES || errno == EPERM ? "; root may, or the group that owns it" : "");
        return -1;
    }
    if (fstat(fd, &st) == 0 && S_ISBLK(st.st_mode)) {
        snprintf(number, sizeof number, "%u:%u", major(st.st_rdev), minor(st.st_rdev));
        if (strcmp(number, dev_number) == 0) return fd;
    }
    sys_close(fd);
    snprintf(out->smart_why, sizeof out->smart_why, "%.64s is not the drive that sysfs names",
             path);
    return -1;
}

void drive_smart_read(const char *dev_number, struct drive_facts *out)
{
    _Alignas(8) uint8_t log[DRIVE_SMART_BYTES] = { 0 };
    if (strncmp(out->under, "nvme", 4) != 0) {
        snprintf(out->smart_why, sizeof out->smart_why,
                 "%.60s is no NVMe drive; only those are asked for wear", out->under);
        return;
    }
    int fd = open_drive(out->under, dev_number, out);
    if (fd < 0) return;
    uint32_t dwords = DRIVE_SMART_BYTES / 4 - 1; /* counted from 0 */
    int rc = admin(fd, OP_GET_LOG, ALL_NAMESPACES, LOG_SMART | dwords << 16, log, sizeof log);
    uint8_t *id = rc == 0 ? sys_mmap(DRIVE_IDENTIFY_BYTES, false) : NULL;
    if (rc == EACCES || rc == EPERM)
        snprintf(out->smart_why, sizeof out->smart_why,
                 "the kernel refuses admin commands to /dev/%.60s: run as root or with "
                 "CAP_SYS_ADMIN",
                 out->under);
    else if (rc)
        snprintf(out->smart_why, sizeof out->smart_why, "/dev/%.60s did not give its log: %s",
                 out->under, rc > 0 ? strerror(rc) : "the drive refused the command");
    else if (drive_smart_decode(log, out) && id &&
             admin(fd, OP_IDENTIFY, 0, IDENTIFY_CONTROLLER, id, DRIVE_IDENTIFY_BYTES) == 0)
        drive_identify_decode(id, out);
    sys_munmap(id, DRIVE_IDENTIFY_BYTES);
    sys_close(fd);
}

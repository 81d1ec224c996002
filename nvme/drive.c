/* nvme/drive.c - from a path to the drive below it, by sysfs.
 *
 * dev/block/MAJOR:MINOR leads to the block device; a partition lies inside its disk; RAID and LVM
 * name what they consist of in `slaves`; the disk's `device` leads to the controller and upwards to
 * the PCI device with link and NUMA node. Reads small text files only; SMART is in drive_smart.c.
 * Any thread; no state. What is not there stays unknown. */
#include "nvme/drive_impl.h"
#include "base/sys.h"
#include "base/topology.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#define LEVELS_MAX 8 /* of RAID upon LVM upon partitions */
#define MOUNTINFO_MAX (1u << 20)

/* --- small files ------------------------------------------------------------------------------ */

static bool join(char out[PATH_MAX], const char *dir, const char *name)
{
    int n = snprintf(out, PATH_MAX, "%s/%s", dir, name);
    return n > 0 && n < PATH_MAX;
}

static bool exists(const char *dir, const char *name)
{
    char path[PATH_MAX];
    struct stat st;
    return join(path, dir, name) && stat(path, &st) == 0;
}

/* The first line without blanks at its ends; false: no such file. */
static bool read_line(const char *dir, const char *name, char *buf, size_t size_bytes)
{
    char path[PATH_MAX];
    buf[0] = '\0';
    int fd = join(path, dir, name) ? sys_open(path, O_RDONLY, 0) : -1;
    if (fd < 0) return false;
    int64_t n = sys_read_full(fd, buf, size_bytes - 1, 0);
    sys_close(fd);
    if (n < 0) n = 0;
    buf[n] = '\0';
    buf[strcspn(buf, "\n")] = '\0';
    size_t end = strlen(buf), from = strspn(buf, " \t");
    while (end > from && isspace((unsigned char)buf[end - 1])) end--;
    memmove(buf, buf + from, end - from);
    buf[end - from] = '\0';
    return true;
}

static bool resolve(char out[PATH_MAX], const char *dir, const char *name)
{
    char path[PATH_MAX];
    return join(path, dir, name) && realpath(path, out);
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Cuts the last component off; false: nothing is left of it. */
static bool go_up(char *path)
{
    char *slash = strrchr(path, '/');
    if (!slash || slash == path) return false;
    *slash = '\0';
    return true;
}

/* --- the PCIe link ---------------------------------------------------------------------------- */

/* Line codes: PCI Express Base Specification, chapter 4 (physical layer): 8b/10b up to 5 GT/s,
 * 128b/130b from 8 to 32 GT/s; at 64 GT/s, flits of 256 bytes with 236 of transaction layer. */
double drive_link_rate(const char *speed, uint32_t width)
{
    static const struct { double transfers; double of, from; } codes[] = {
        { 2.5, 8, 10 },     { 5.0, 8, 10 },     { 8.0, 128, 130 },
        { 16.0, 128, 130 }, { 32.0, 128, 130 }, { 64.0, 236, 256 },
    };
    char *end;
    double transfers = strtod(speed, &end);
    if (end == speed || strncmp(end, " GT/s", 5) != 0 || width == 0 || width > 32) return 0;
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (transfers > codes[i].transfers - 0.1 && transfers < codes[i].transfers + 0.1)
            return codes[i].transfers * 1e9 * codes[i].of / codes[i].from / 8 * width;
    return 0;
}

/* --- what belongs to the whole disk ----------------------------------------------------------- */

/* The controller's folder: the disk's `device`. Under native multipath that is a subsystem, whose
 * first controller is taken. */
static bool find_controller(const char *disk, char out[PATH_MAX])
{
    if (!resolve(out, disk, "device")) return false;
    if (!strstr(out, "nvme-subsystem")) return true;
    for (int i = 0; i < 64; i++) {
        char name[16], at[PATH_MAX];
        snprintf(name, sizeof name, "nvme%d", i);
        if (!resolve(at, out, name)) continue;
        memcpy(out, at, sizeof at);
        return true;
    }
    return true;
}

/* Upwards from the controller: the first folder that knows its link. Only an NVMe drive's own link is
 * its limit; a virtual disk's is fiction and a SATA controller's is shared. */
static void read_bus(const char *sysfs, const char *disk, struct drive_facts *out)
{
    char at[PATH_MAX], speed[64], width[32];
    if (!find_controller(disk, at)) return;
    out->numa_node = topology_node_of_device(sysfs, at);
    for (int level = 0; level < 16 && strncmp(out->under, "nvme", 4) == 0; level++) {
        if (read_line(at, "current_link_speed", speed, sizeof speed) &&
            read_line(at, "current_link_width", width, sizeof width)) {
            out->link_bytes_per_s = drive_link_rate(speed, (uint32_t)strtoul(width, NULL, 10));
            return;
        }
        if (!go_up(at)) return;
    }
}

static void read_model(const char *disk, struct drive_facts *out)
{
    char text[512], real[PATH_MAX];
    if (read_line(disk, "loop/backing_file", text, sizeof text))
        snprintf(out->model, sizeof out->model, "loop device on %.40s", text);
    else if (read_line(disk, "device/model", text, sizeof text) && text[0])
        snprintf(out->model, sizeof out->model, "%.40s", text);
    else if (resolve(real, disk, "device") && strstr(real, "/virtio"))
        snprintf(out->model, sizeof out->model, "virtio disk");
}

/* --- from a block device to the whole disk ---------------------------------------------------- */

/* The first (by name) of what this device consists of, with their number; 0: it is no RAID or
 * LVM. */
static uint32_t first_slave(const char *dir, char out[PATH_MAX])
{
    char path[PATH_MAX], first[NAME_MAX + 1] = "";
    uint32_t n = 0;
    DIR *d = join(path, dir, "slaves") ? opendir(path) : NULL;
    if (!d) return 0;
    for (struct dirent *e; (e = readdir(d));) {
        if (e->d_name[0] == '.') continue;
        if (n++ == 0 || strcmp(e->d_name, first) < 0)
            snprintf(first, sizeof first, "%s", e->d_name);
    }
    closedir(d);
    return n > 0 && resolve(out, path, first) ? n : 0;
}

bool drive_walk(const char *sysfs, unsigned major_, unsigned minor_, struct drive_facts *out)
{
    char name[64], dir[PATH_MAX], below[PATH_MAX], number[32], note[80] = "";
    snprintf(name, sizeof name, "dev/block/%u:%u", major_, minor_);
    if (!resolve(dir, sysfs, name)) return false;
    snprintf(out->device, sizeof out->device, "%.60s", base_name(dir));
    for (int level = 0; level < LEVELS_MAX; level++) {
        if (exists(dir, "partition") && !go_up(dir)) break;
        uint32_t n = first_slave(dir, below);
        if (n == 0) break;
        if (n > 1 && !note[0])
            snprintf(note, sizeof note, " (first of %u under %.16s)", n, base_name(dir));
        else if (!note[0]) snprintf(note, sizeof note, " (under %.24s)", base_name(dir));
        memcpy(dir, below, sizeof dir);
    }
    snprintf(out->under, sizeof out->under, "%.60s", base_name(dir));
    read_model(dir, out);
    size_t used = strlen(out->model);
    if (note[0])
        snprintf(out->model + used, sizeof out->model - used, "%s", used ? note : note + 1);
    char spins[8];
    out->rotational = read_line(dir, "queue/rotational", spins, sizeof spins) && spins[0] == '1';
    read_bus(sysfs, dir, out);
    read_line(dir, "dev", number, sizeof number);
    drive_smart_read(number, out);
    return true;
}

/* --- the mount -------------------------------------------------------------------------------- */

/* A line of mountinfo: "36 35 98:0 /root /mount options [fields] - type source super", proc(5). */
static bool parse_mount(char *line, dev_t dev, char *type, size_t type_bytes, char *source,
                        size_t source_bytes)
{
    unsigned ma, mi;
    if (sscanf(line, "%*d %*d %u:%u", &ma, &mi) != 2 || makedev(ma, mi) != dev) return false;
    char *dash = strstr(line, " - ");
    if (!dash) return false;
    char *save, *t = strtok_r(dash + 3, " \n", &save), *s = strtok_r(NULL, " \n", &save);
    snprintf(type, type_bytes, "%s", t ? t : "");
    snprintf(source, source_bytes, "%s", s ? s : "");
    return true;
}

static void read_mount(dev_t dev, struct drive_facts *out, char *source, size_t source_bytes)
{
    source[0] = '\0';
    int fd = sys_open("/proc/self/mountinfo", O_RDONLY, 0);
    char *text = fd >= 0 ? sys_calloc(1, MOUNTINFO_MAX) : NULL, *save = NULL;
    int64_t n = text ? sys_read_full(fd, text, MOUNTINFO_MAX - 1, 0) : 0;
    sys_close(fd);
    for (char *line = n > 0 ? strtok_r(text, "\n", &save) : NULL; line;
         line = strtok_r(NULL, "\n", &save))
        if (parse_mount(line, dev, out->file_system, sizeof out->file_system, source, source_bytes))
            break;
    sys_free(text);
}

stk_status drive_facts_read(const char *path, const char *sysfs, struct drive_facts *out,
                            struct stk_error *err)
{
    struct stat st, device;
    char source[PATH_MAX];
    memset(out, 0, sizeof *out);
    out->numa_node = -1;
    if (stat(path, &st) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot be looked up: %s", path,
                             strerror(errno));
    out->device_id = st.st_dev;
    read_mount(st.st_dev, out, source, sizeof source);
    dev_t dev = st.st_dev;
    /* file systems over several devices (btrfs) have a number of their own; the mount names one of
     * the devices */
    if (major(dev) == 0 && strncmp(source, "/dev/", 5) == 0 && stat(source, &device) == 0 &&
        S_ISBLK(device.st_mode))
        dev = device.st_rdev;
    if (!drive_walk(sysfs, major(dev), minor(dev), out))
        snprintf(out->smart_why, sizeof out->smart_why,
                 "no block device is under this path (file system %.30s)",
                 out->file_system[0] ? out->file_system : "unknown");
    return STK_OK;
}

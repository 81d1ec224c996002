/* tests/nvme/test_drive.c - drive facts from made sysfs trees and made SMART pages. */
#include "tests/nvme/world.h"
#include "nvme/drive_impl.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

/* --- a tree ----------------------------------------------------------------------------------- */

struct tree { char root[512]; unsigned ma, mi; };

static void put(const struct tree *t, const char *path, const char *text)
{
    char full[1100];
    snprintf(full, sizeof full, "%s/%s", t->root, path);
    char *slash = strrchr(full, '/');
    *slash = '\0';
    sys_mkdirs(full);
    *slash = '/';
    int fd = sys_open(full, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    CHECK(fd >= 0 && sys_write_full(fd, text, strlen(text), 0) == (int64_t)strlen(text));
    sys_close(fd);
}

static void make_link(const struct tree *t, const char *from, const char *to)
{
    char full[1100], target[1100];
    snprintf(full, sizeof full, "%s/%s", t->root, from);
    snprintf(target, sizeof target, "%s/%s", t->root, to);
    char *slash = strrchr(full, '/');
    *slash = '\0';
    sys_mkdirs(full);
    *slash = '/';
    CHECK(symlink(target, full) == 0);
}

static bool tree_new(struct tree *t)
{
    struct stat st;
    if (!world_dir(t->root, sizeof t->root) || stat(t->root, &st) != 0) return false;
    t->ma = major(st.st_dev);
    t->mi = minor(st.st_dev);
    put(t, "devices/system/node/online", "0-1\n");
    return true;
}

/* What lies under the tree's own folder is this device. */
static void tree_here(const struct tree *t, const char *device)
{
    char name[64];
    snprintf(name, sizeof name, "dev/block/%u:%u", t->ma, t->mi);
    make_link(t, name, device);
}

static void tree_nvme(const struct tree *t, int k, const char *model, int node)
{
    char path[300], pci[200], text[32];
    snprintf(pci, sizeof pci, "devices/pci0000:00/0000:00:0%d.0/0000:0%d:00.0", k + 1, k + 1);
    snprintf(path, sizeof path, "%s/current_link_speed", pci);
    put(t, path, "16.0 GT/s PCIe\n");
    snprintf(path, sizeof path, "%s/current_link_width", pci);
    put(t, path, "4\n");
    snprintf(path, sizeof path, "%s/numa_node", pci);
    snprintf(text, sizeof text, "%d\n", node);
    put(t, path, text);
    snprintf(path, sizeof path, "%s/nvme/nvme%d/model", pci, k);
    put(t, path, model);
    snprintf(path, sizeof path, "%s/nvme/nvme%d/nvme%dn1/queue/rotational", pci, k, k);
    put(t, path, "0\n");
    snprintf(path, sizeof path, "%s/nvme/nvme%d/nvme%dn1/dev", pci, k, k);
    put(t, path, "999:999\n");
    char to[300];
    snprintf(path, sizeof path, "%s/nvme/nvme%d/nvme%dn1/device", pci, k, k);
    snprintf(to, sizeof to, "%s/nvme/nvme%d", pci, k);
    make_link(t, path, to);
    snprintf(path, sizeof path, "%s/nvme/nvme%d/nvme%dn1/nvme%dn1p2/partition", pci, k, k, k);
    put(t, path, "2\n");
}

#define NVME0 "devices/pci0000:00/0000:00:01.0/0000:01:00.0/nvme/nvme0/nvme0n1"
#define NVME1 "devices/pci0000:00/0000:00:02.0/0000:02:00.0/nvme/nvme1/nvme1n1"
#define GEN4_X4 (16e9 * 128 / 130 / 8 * 4)

static void read_here(const struct tree *t, struct drive_facts *f)
{
    struct stk_error err = { 0 };
    CHECK_OK(drive_facts_read(t->root, t->root, f, &err), &err);
    CHECK(!f->smart && f->smart_why[0]);
    printf("# %s under %s, \"%s\", %s, node %d, link %.3g: %s\n", f->device, f->under, f->model,
           f->file_system, f->numa_node, f->link_bytes_per_s, f->smart_why);
}

TEST(drive_nvme_disk)
{
    struct tree t;
    struct drive_facts f;
    REQUIRE(tree_new(&t));
    tree_nvme(&t, 0, "Fast SSD 990 1TB                        \n", 1);
    tree_here(&t, NVME0);
    read_here(&t, &f);
    CHECK(strcmp(f.device, "nvme0n1") == 0 && strcmp(f.under, "nvme0n1") == 0);
    CHECK(strcmp(f.model, "Fast SSD 990 1TB") == 0 && !f.rotational && f.numa_node == 1);
    CHECK(f.link_bytes_per_s > GEN4_X4 * 0.999999 && f.link_bytes_per_s < GEN4_X4 * 1.000001);
    CHECK(f.device_id == makedev(t.ma, t.mi));
    put(&t, "devices/system/node/online", "0\n"); /* a machine of one node */
    read_here(&t, &f);
    CHECK(f.numa_node == -1);
    sys_remove_tree(t.root);
}

TEST(drive_partition)
{
    struct tree t;
    struct drive_facts f;
    REQUIRE(tree_new(&t));
    tree_nvme(&t, 0, "Fast SSD\n", 0);
    tree_here(&t, NVME0 "/nvme0n1p2");
    read_here(&t, &f);
    CHECK(strcmp(f.device, "nvme0n1p2") == 0 && strcmp(f.under, "nvme0n1") == 0);
    CHECK(strcmp(f.model, "Fast SSD") == 0 && f.numa_node == 0 && f.link_bytes_per_s > 7e9);
    sys_remove_tree(t.root);
}

TEST(drive_raid_and_lvm)
{
    struct tree t;
    struct drive_facts f;
    REQUIRE(tree_new(&t));
    tree_nvme(&t, 0, "Fast SSD\n", 0);
    tree_nvme(&t, 1, "Slow SSD\n", 1);
    put(&t, "devices/virtual/block/md0/size", "100\n");
    make_link(&t, "devices/virtual/block/md0/slaves/nvme1n1", NVME1);
    make_link(&t, "devices/virtual/block/md0/slaves/nvme0n1p2", NVME0 "/nvme0n1p2");
    tree_here(&t, "devices/virtual/block/md0");
    read_here(&t, &f);
    CHECK(strcmp(f.device, "md0") == 0 && strcmp(f.under, "nvme0n1") == 0 && f.numa_node == 0);
    CHECK(strcmp(f.model, "Fast SSD (first of 2 under md0)") == 0);
    /* LVM on a partition of the RAID */
    char name[64], full[600];
    put(&t, "devices/virtual/block/md0/md0p1/partition", "1\n");
    make_link(&t, "devices/virtual/block/dm-3/slaves/md0p1", "devices/virtual/block/md0/md0p1");
    snprintf(name, sizeof name, "dev/block/%u:%u", t.ma, t.mi);
    snprintf(full, sizeof full, "%s/%s", t.root, name);
    CHECK(unlink(full) == 0);
    tree_here(&t, "devices/virtual/block/dm-3");
    read_here(&t, &f);
    CHECK(strcmp(f.device, "dm-3") == 0 && strcmp(f.under, "nvme0n1") == 0);
    CHECK(strcmp(f.model, "Fast SSD (under dm-3)") == 0);
    sys_remove_tree(t.root);
}

/* Native multipath: the disk's `device` is the subsystem. */
TEST(drive_multipath)
{
    struct tree t;
    struct drive_facts f;
    REQUIRE(tree_new(&t));
    tree_nvme(&t, 3, "Fast SSD\n", 1);
    put(&t, "devices/virtual/nvme-subsystem/nvme-subsys0/model", "Fast SSD\n");
    make_link(&t, "devices/virtual/nvme-subsystem/nvme-subsys0/nvme3",
              "devices/pci0000:00/0000:00:04.0/0000:04:00.0/nvme/nvme3");
    make_link(&t, "devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1/device",
              "devices/virtual/nvme-subsystem/nvme-subsys0");
    tree_here(&t, "devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1");
    read_here(&t, &f);
    CHECK(strcmp(f.under, "nvme0n1") == 0 && strcmp(f.model, "Fast SSD") == 0);
    CHECK(f.link_bytes_per_s > 7e9 && f.numa_node == 1);
    sys_remove_tree(t.root);
}

TEST(drive_virtio_and_loop)
{
    struct tree t;
    struct drive_facts f;
    REQUIRE(tree_new(&t));
    put(&t, "devices/pci0000:00/0000:00:02.0/virtio1/vendor", "0x1af4\n");
    put(&t, "devices/pci0000:00/0000:00:02.0/current_link_speed", "2.5 GT/s PCIe\n");
    put(&t, "devices/pci0000:00/0000:00:02.0/current_link_width", "1\n");
    put(&t, "devices/pci0000:00/0000:00:02.0/numa_node", "1\n");
    put(&t, "devices/pci0000:00/0000:00:02.0/virtio1/block/vda/queue/rotational", "1\n");
    make_link(&t, "devices/pci0000:00/0000:00:02.0/virtio1/block/vda/device",
              "devices/pci0000:00/0000:00:02.0/virtio1");
    tree_here(&t, "devices/pci0000:00/0000:00:02.0/virtio1/block/vda");
    read_here(&t, &f);
    CHECK(strcmp(f.device, "vda") == 0 && strcmp(f.model, "virtio disk") == 0);
    CHECK(f.rotational && f.link_bytes_per_s == 0 && f.numa_node == 1);
    CHECK(strstr(f.smart_why, "vda is no NVMe drive"));
    sys_remove_tree(t.root);

    REQUIRE(tree_new(&t));
    put(&t, "devices/virtual/block/loop3/loop/backing_file", "/data/disk.img\n");
    put(&t, "devices/virtual/block/loop3/queue/rotational", "0\n");
    tree_here(&t, "devices/virtual/block/loop3");
    read_here(&t, &f);
    CHECK(strcmp(f.device, "loop3") == 0 && strcmp(f.under, "loop3") == 0);
    CHECK(strcmp(f.model, "loop device on /data/disk.img") == 0);
    CHECK(f.numa_node == -1 && f.link_bytes_per_s == 0);
    sys_remove_tree(t.root);
}

TEST(drive_none)
{
    struct drive_facts f;
    struct stk_error err = { 0 };
    struct tree t;
    REQUIRE(tree_new(&t)); /* a tree that knows nothing */
    read_here(&t, &f);
    CHECK(f.device[0] == '\0' && f.under[0] == '\0' && f.numa_node == -1);
    CHECK(strstr(f.smart_why, "no block device"));
    sys_remove_tree(t.root);
    CHECK(drive_facts_read("/no/such/path", "/sys", &f, &err) == STK_ERR_IO);
    CHECK(strstr(err.text, "/no/such/path"));
    stk_error_clear(&err);
    CHECK_OK(drive_facts_read("/proc", "/sys", &f, &err), &err);
    CHECK(f.device[0] == '\0' && strcmp(f.file_system, "proc") == 0);
    if (drive_facts_read("/dev/shm", "/sys", &f, &err) == STK_OK && f.file_system[0])
        CHECK(strcmp(f.file_system, "tmpfs") == 0 && f.device[0] == '\0');
    CHECK_OK(drive_facts_read("/", "/sys", &f, &err), &err); /* whatever this machine has */
    printf("# here: %s under %s, \"%s\", %s, node %d: %s\n", f.device, f.under, f.model,
           f.file_system, f.numa_node, f.smart_why);
}

/* --- links ------------------------------------------------------------------------------------ */

TEST(drive_link_rates)
{
    static const struct { const char *speed; uint32_t width; double want; } rows[] = {
        { "2.5 GT/s PCIe", 1, 0.25e9 },     { "5.0 GT/s PCIe", 4, 2e9 },
        { "8.0 GT/s PCIe", 4, 3.938462e9 }, { "16.0 GT/s PCIe", 4, 7.876923e9 },
        { "32.0 GT/s PCIe", 4, 15.753846e9 }, { "64.0 GT/s PCIe", 4, 29.5e9 },
        { "8 GT/s", 2, 1.969231e9 },        { "Unknown", 4, 0 },
        { "16.0 GT/s PCIe", 0, 0 },         { "16.0 GT/s PCIe", 255, 0 },
        { "17.0 GT/s PCIe", 4, 0 },         { "", 4, 0 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        double got = drive_link_rate(rows[i].speed, rows[i].width), want = rows[i].want;
        CHECK(got >= want * 0.999999 && got <= want * 1.000001);
    }
}

/* --- SMART ------------------------------------------------------------------------------------ */

TEST(drive_smart_pages)
{
    uint8_t log[DRIVE_SMART_BYTES] = { 0 }, *id = calloc(1, DRIVE_IDENTIFY_BYTES);
    struct drive_facts f = { 0 };
    CHECK(!drive_smart_decode(log, &f) && !f.smart && strstr(f.smart_why, "empty"));
    log[1] = 0x36, log[2] = 0x01; /* 310 K */
    log[3] = 100, log[4] = 10;
    log[5] = 4;                                       /* percent */
    log[48] = 0x80, log[49] = 0x96, log[50] = 0x98;   /* 10,000,000 data units */
    f = (struct drive_facts){ 0 };
    CHECK(drive_smart_decode(log, &f) && f.smart && !f.critical_warning);
    CHECK(f.temperature_c == 37 && f.percentage_used == 4 && f.written_bytes == 5.12e12);
    CHECK(f.endurance_bytes == 1.28e14 && f.warning_temperature_c == 0);
    /* new: no percentage, no estimate */
    log[5] = 0;
    CHECK(drive_smart_decode(log, &f) && f.endurance_bytes == 0 && f.written_bytes == 5.12e12);
    /* worn out, hot, warned; a counter beyond 64 bits: 2^64 + 10,000,000 */
    log[0] = 0x05, log[1] = 0x70, log[5] = 255, log[56] = 1;
    CHECK(drive_smart_decode(log, &f) && f.critical_warning && f.percentage_used == 255);
    CHECK(f.temperature_c == 95);
    CHECK(f.written_bytes > 18446744073709551616.0 * 512000 * 0.999999999 &&
          f.written_bytes < 18446744073709551616.0 * 512000 * 1.000000001);
    CHECK(f.endurance_bytes < f.written_bytes && f.endurance_bytes > f.written_bytes * 0.39);
    memset(log + 48, 0xff, 16); /* the largest 128-bit number */
    CHECK(drive_smart_decode(log, &f) && f.written_bytes > 3.4e38 * 5e5);
    /* only its own bytes count */
    memset(log + 64, 0xff, sizeof log - 64);
    memset(log + 6, 0xff, 42);
    double before = f.written_bytes;
    CHECK(drive_smart_decode(log, &f) && f.written_bytes == before && f.temperature_c == 95);
    drive_identify_decode(id, &f);
    CHECK(f.warning_temperature_c == 0);
    id[266] = 0x66, id[267] = 0x01; /* 358 K */
    drive_identify_decode(id, &f);
    CHECK(f.warning_temperature_c == 85);
    free(id);
}

TEST_MAIN()

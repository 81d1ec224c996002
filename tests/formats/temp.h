/* tests/formats/temp.h - a folder of its own for each test program, and whole files in it.
 * Removed at exit. */
#ifndef TESTS_FORMATS_TEMP_H
#define TESTS_FORMATS_TEMP_H

#include "base/sys.h"
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char temp_dir[200];

static inline void temp_remove(void) { (void)sys_remove_tree(temp_dir); }

/* A path inside the folder: one of eight rotating buffers. */
static inline const char *temp_path(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static inline const char *temp_path(const char *fmt, ...)
{
    static char ring[8][400];
    static unsigned turn;
    if (!temp_dir[0]) {
        /* Memory first: the fault tests flush thousands of small files. */
        const char *base = getenv("TMPDIR");
        if (!base) base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
        snprintf(temp_dir, sizeof temp_dir, "%.150s/stoker-formats-XXXXXX", base);
        STK_ASSERT(mkdtemp(temp_dir) != NULL);
        atexit(temp_remove);
    }
    char *out = ring[turn++ % 8];
    int n = snprintf(out, sizeof ring[0], "%s/", temp_dir);
    va_list args;
    va_start(args, fmt);
    vsnprintf(out + n, sizeof ring[0] - (size_t)n, fmt, args);
    va_end(args);
    return out;
}

static inline const char *temp_write(const char *path, const void *bytes, size_t size)
{
    FILE *f = fopen(path, "wb");
    STK_ASSERT(f != NULL);
    STK_ASSERT(fwrite(bytes, 1, size, f) == size);
    STK_ASSERT(fclose(f) == 0);
    return path;
}

static inline const char *temp_text(const char *path, const char *text)
{
    return temp_write(path, text, strlen(text));
}

/* malloc'd; the caller frees. */
static inline char *temp_read(const char *path, size_t *size)
{
    FILE *f = fopen(path, "rb");
    STK_ASSERT(f != NULL);
    struct stat st;
    STK_ASSERT(fstat(fileno(f), &st) == 0);
    char *bytes = malloc((size_t)st.st_size + 1);
    STK_ASSERT(bytes != NULL);
    STK_ASSERT(fread(bytes, 1, (size_t)st.st_size, f) == (size_t)st.st_size);
    bytes[st.st_size] = 0;
    fclose(f);
    *size = (size_t)st.st_size;
    return bytes;
}

static inline bool temp_exists(const char *path) { return access(path, F_OK) == 0; }

/* A safetensors file from the header's text and a count of data bytes (each 0x5a). */
static inline const char *temp_safetensors(const char *path, const char *header, size_t data_bytes)
{
    size_t n = strlen(header);
    unsigned char *bytes = malloc(8 + n + data_bytes);
    STK_ASSERT(bytes != NULL);
    for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)((uint64_t)n >> (8 * i));
    memcpy(bytes + 8, header, n);
    memset(bytes + 8 + n, 0x5a, data_bytes);
    temp_write(path, bytes, 8 + n + data_bytes);
    free(bytes);
    return path;
}

#endif

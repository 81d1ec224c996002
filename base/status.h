/* base/status.h - status codes and error sentences.
 *
 * Every call that can fail returns `stk_status` and takes a `struct stk_error *err` (may be NULL)
 * that keeps the code, the place and one sentence for a person. The first error wins: a later
 * stk_error_set on the same object is ignored until stk_error_clear, so that the cause is not
 * buried under what followed from it. No globals; an error object belongs to whoever owns the
 * handle or the stack frame and is not shared between threads.
 *
 * The enum is also in engine/stoker.h, the only installed header; tests/base checks that the two
 * agree. */
#ifndef BASE_STATUS_H
#define BASE_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* X(name, value, short text) */
#define STK_STATUS_MAP(X)                                                                          \
    X(STK_OK, 0, "done")                                                                           \
    X(STK_ERR_NOMEM, -1, "memory, or a fixed budget, is exhausted")                                \
    X(STK_ERR_IO, -2, "a storage or file operation failed")                                        \
    X(STK_ERR_CORRUPT, -3, "stored bytes do not match their checksum or format")                   \
    X(STK_ERR_DEVICE, -4, "a device or driver call failed")                                        \
    X(STK_ERR_CONFIG, -5, "an option or configuration value is wrong, or values contradict")       \
    X(STK_ERR_STATE, -6, "the call is not allowed now")                                            \
    X(STK_ERR_FORMAT, -7, "a file is not what it should be")                                       \
    X(STK_ERR_NOSPACE, -8, "too little room on a disk")                                            \
    X(STK_ERR_UNSUPPORTED, -9, "this machine or build cannot do it")                               \
    X(STK_ERR_STALLED, -10, "nothing can make progress")                                           \
    X(STK_ERR_NONFINITE, -11, "too many steps in a row had a non-finite gradient")                 \
    X(STK_ERR_INTERRUPTED, -12, "asked to stop")                                                   \
    X(STK_BUSY, 1, "no room now: reap or wait, then try again")                                    \
    X(STK_END, 2, "nothing more to do in this step")

#ifndef STK_STATUS_TYPE
#define STK_STATUS_TYPE
#define STK_STATUS_ENUM(name, value, text) name = value,
typedef enum stk_status {
    STK_STATUS_MAP(STK_STATUS_ENUM) STK_STATUS_FORCE_INT = 0x7fffffff
} stk_status;
#undef STK_STATUS_ENUM
#endif

#define STK_ERROR_TEXT_MAX 768

struct stk_error {
    stk_status code;      /* STK_OK while nothing happened */
    int os_errno;         /* errno of the cause, 0 if none */
    const char *file;     /* source file and line that noticed; static string */
    int line;
    char text[STK_ERROR_TEXT_MAX]; /* one sentence: what, where, what was expected, what to do */
};

/* Name of a code ("STK_ERR_IO") and its short text. Never NULL; unknown codes get "STK_?" . */
const char *stk_status_name(stk_status code);
const char *stk_status_text(stk_status code);

void stk_error_clear(struct stk_error *err);

/* Records an error unless one is there already (first wins) and returns `code`, so that one can
 * write
 *     return stk_error_set(err, STK_ERR_IO, errno, "%s: cannot open for reading: %s", path,
 *             strerror(errno));
 * `err` may be NULL (only the code is returned). Truncates over-long text; always terminated. Needs
 * no memory. */
#define stk_error_set(err, code, os_errno, ...)                                                    \
    stk_error_set_at(err, code, os_errno, __FILE__, __LINE__, __VA_ARGS__)
stk_status stk_error_set_at(struct stk_error *err, stk_status code, int os_errno, const char *file,
                            int line, const char *fmt, ...) __attribute__((format(printf, 6, 7)));

/* Copies `from` into `to` unless `to` holds an error already; returns from->code. */
stk_status stk_error_forward(struct stk_error *to, const struct stk_error *from);

/* Programmer errors only; always on; prints to stderr and aborts. Never for I/O, options or memory
 * limits. */
#define STK_ASSERT(cond) ((cond) ? (void)0 : stk_assert_fail(#cond, __FILE__, __LINE__))
void stk_assert_fail(const char *cond, const char *file, int line) __attribute__((noreturn));

#define STK_TRY(expr)                                                                              \
    do {                                                                                           \
        stk_status stk_try_status_ = (expr);                                                       \
        if (stk_try_status_ != STK_OK) return stk_try_status_;                                     \
    } while (0)

#endif

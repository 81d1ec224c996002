/* base/status.c - names of status codes and the recording of error sentences.
 *
 * Owns: the text of every code, the rule that the first error wins, and the end of the process
 * after a programmer error.
 * Must not know: anything above it; it allocates nothing and keeps no state of its own.
 * Thread: any; an error object belongs to its owner. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

const char *stk_status_name(stk_status code)
{
    switch ((int)code) {
#define STATUS_NAME(name, value, text) \
    case value: return #name;
        STK_STATUS_MAP(STATUS_NAME)
#undef STATUS_NAME
    default: return "STK_?";
    }
}

const char *stk_status_text(stk_status code)
{
    switch ((int)code) {
#define STATUS_TEXT(name, value, text) \
    case value: return text;
        STK_STATUS_MAP(STATUS_TEXT)
#undef STATUS_TEXT
    default: return "STK_?";
    }
}

void stk_error_clear(struct stk_error *err)
{
    if (err) *err = (struct stk_error){ .code = STK_OK };
}

stk_status stk_error_set_at(struct stk_error *err, stk_status code, int os_errno, const char *file,
                            int line, const char *fmt, ...)
{
    if (!err || err->code != STK_OK) return code;
    err->code = code;
    err->os_errno = os_errno;
    err->file = file;
    err->line = line;
    va_list args;
    va_start(args, fmt);
    if (vsnprintf(err->text, sizeof err->text, fmt, args) < 0) err->text[0] = '\0';
    va_end(args);
    return code;
}

stk_status stk_error_forward(struct stk_error *to, const struct stk_error *from)
{
    if (to && to != from && to->code == STK_OK) *to = *from;
    return from->code;
}

void stk_assert_fail(const char *cond, const char *file, int line)
{
    fprintf(stderr, "stoker: internal error at %s:%d: %s does not hold\n", file, line, cond);
    abort();
}

/* base/sys_fault.h - private to base/sys*.c: asks whether an armed fault falls on this call. */
#ifndef BASE_SYS_FAULT_H
#define BASE_SYS_FAULT_H

#include "base/sys.h"

/* Counts the call if `kind` is armed. True: it must fail now; errno is set. Any thread. */
bool sys_fault_hit(enum sys_call kind);

#endif

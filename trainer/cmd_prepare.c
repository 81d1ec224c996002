/* trainer/cmd_prepare.c - stub. */
#include "trainer/cmd.h"
int cmd_prepare(int argc, char **argv) { (void)argc; (void)argv; return EXIT_OPERATING; }

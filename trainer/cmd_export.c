/* trainer/cmd_export.c - stub. */
#include "trainer/cmd.h"
int cmd_export(int argc, char **argv) { (void)argc; (void)argv; return EXIT_OPERATING; }

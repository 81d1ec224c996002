/* trainer/cmd_inspect.c - stub. */
#include "trainer/cmd.h"
int cmd_inspect(int argc, char **argv) { (void)argc; (void)argv; return EXIT_OPERATING; }

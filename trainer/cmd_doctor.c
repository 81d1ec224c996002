/* trainer/cmd_doctor.c - stub. */
#include "trainer/cmd.h"
int cmd_doctor(int argc, char **argv) { (void)argc; (void)argv; return EXIT_OPERATING; }

/* tests/nvme/netfs_program.c - `netfs FOLDER`: tests/nvme/netfs.h as a program, for tests of the command. */
#include "tests/nvme/netfs.h"

int main(int argc, char **argv) { return argc == 2 ? netfs_main(argv[1]) : 2; }

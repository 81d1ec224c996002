/* nvme/drive_impl.h - the pure parts of drive facts, for their tests. Private to nvme/drive*.c. */
#ifndef NVME_DRIVE_IMPL_H
#define NVME_DRIVE_IMPL_H

#include "nvme/drive.h"

#define DRIVE_SMART_BYTES 512u
#define DRIVE_IDENTIFY_BYTES 4096u

/* Fills the fields of SMART from a log page 02h (smart, percentage_used, ...). False, with
 * smart_why: the page is empty. */
bool drive_smart_decode(const uint8_t log[DRIVE_SMART_BYTES], struct drive_facts *out);
/* warning_temperature_c from Identify Controller. */
void drive_identify_decode(const uint8_t id[DRIVE_IDENTIFY_BYTES], struct drive_facts *out);
/* Asks the drive /dev/<out->under>, if its device number is the `dev` of the sysfs folder
 * ("259:0"): sets smart or smart_why. */
void drive_smart_read(const char *dev_number, struct drive_facts *out);
/* Payload bytes per second of a PCIe link: "16.0 GT/s PCIe", 4. 0: unknown. */
double drive_link_rate(const char *speed, uint32_t width);
/* Everything but device_id and file_system, for the block device major:minor. False: sysfs does not
 * know it. */
bool drive_walk(const char *sysfs, unsigned major_, unsigned minor_, struct drive_facts *out);

#endif

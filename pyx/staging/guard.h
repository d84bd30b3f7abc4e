/* A mapped file that is cut short while it is read: the system sends SIGBUS, which would end the process without a word. */
#pragma once

/* From now on such an end says why, in one line on standard error, and has exit status 2. 0, or an errno.
 *
 * Only in threads that do not block SIGBUS. */
int guard_mapped_files(void);

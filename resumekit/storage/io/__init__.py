"""File system calls, direct I/O, host memory, and the threads that overlap reads and writes."""

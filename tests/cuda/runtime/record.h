// Log of the calls of a process.
#pragma once

// Appends a line to the log: time in seconds, thread, then the text, "NAME key=value key=value ...".
// Does nothing unless HOST_CUDA_LOG has the path of a log; each process adds its number to that path.
void host_cuda_record(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Adds a line of the Python program to the log.
extern "C" void host_cuda_mark(const char* text);

// Adds a line for a call of a function that the runtime lacks.
extern "C" void host_cuda_mark_stub(const char* name);

// Seconds of a monotonic clock, equal in all processes of the machine.
double host_cuda_seconds();

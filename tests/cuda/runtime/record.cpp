// Log of the calls of a process. Each line is written at once, because a rank may end without running exit handlers.
#include "record.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

constexpr size_t MAX_LINE = 65536;  // longer lines are cut
constexpr int CLOSED = -1, LOG_FAILED = 74;

int open_log() {
  const char* prefix = getenv("HOST_CUDA_LOG");
  if (!prefix) return CLOSED;
  std::string path = std::string(prefix) + "." + std::to_string(getpid());
  int log = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (log == CLOSED) _exit(LOG_FAILED);
  const char* rank = getenv("RANK");
  dprintf(log, "%.6f %d PROCESS rank=%s\n", host_cuda_seconds(), getpid(), rank ? rank : "0");
  return log;
}

}  // namespace

double host_cuda_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void host_cuda_record(const char* format, ...) {
  static const int log = open_log();
  if (log == CLOSED) return;
  char line[MAX_LINE];
  int length = snprintf(line, MAX_LINE, "%.6f %ld ", host_cuda_seconds(), (long)syscall(SYS_gettid));
  va_list arguments;
  va_start(arguments, format);
  length += vsnprintf(line + length, MAX_LINE - length, format, arguments);
  va_end(arguments);
  if (length > (int)MAX_LINE - 1) length = MAX_LINE - 1;
  line[length] = '\n';
  if (write(log, line, length + 1) < 0) _exit(LOG_FAILED);  // a log with missing lines would give wrong counts
}

extern "C" void host_cuda_mark(const char* text) { host_cuda_record("MARK %s", text); }

// Log of the calls of a process. Each line is written at once, because a rank may end without running exit handlers.
#include "record.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

namespace {

constexpr size_t MAX_LINE = 65536;  // longer lines are cut
constexpr int NOT_OPENED = -2, CLOSED = -1, LOG_FAILED = 74;

std::atomic<int> log_file{NOT_OPENED};

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

// The log of this process: a forked process opens another one.
int log_of_process() {
  static std::mutex& opening = *new std::mutex;
  static const int registered = pthread_atfork(nullptr, nullptr, [] { log_file = NOT_OPENED; });
  (void)registered;
  if (log_file == NOT_OPENED) {
    std::lock_guard<std::mutex> lock(opening);
    if (log_file == NOT_OPENED) log_file = open_log();
  }
  return log_file;
}

}  // namespace

double host_cuda_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void host_cuda_record(const char* format, ...) {
  const int log = log_of_process();
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

extern "C" void host_cuda_mark_stub(const char* name) { host_cuda_record("STUB name=%s", name); }

// Shared memory of the ranks of a communicator.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

constexpr int MAX_RANKS = 16;

struct Operation {  // a collective as one rank calls it
  uint64_t sequence;
  size_t count;
  int type, root;
  char name[24], reduction[16];

  bool equals(const Operation& other) const;
  std::string text() const;
};

class Channel {
 public:
  // Joins the ranks that use the same name. Returns when all have joined.
  Channel(const std::string& name, int size, int rank);

  const std::string name;
  const int size, rank;

  // Stops all waits of this process: they return false, now and later.
  void abort() { aborted_ = true; }
  bool aborted() const { return aborted_; }

  // Waits until all ranks are here. False after an abort.
  bool barrier();

  // Waits until all ranks call the same operation. Ends the process with a report if they call different ones.
  bool agree(Operation operation);

  // Waits until all ranks have called this function. May be called once.
  bool finalize();

  // Space for one chunk of a rank's data, readable by all ranks between two barriers.
  static constexpr size_t SLOT_BYTES = 1 << 20;
  char* slot(int rank) const { return slots_ + SLOT_BYTES * rank; }

  // Moves the next chunk of a message, if there is space or data. Returns the bytes moved; `at` is the position.
  size_t send_some(int peer, const char* data, size_t bytes, size_t at);
  size_t receive_some(int peer, char* data, size_t bytes, size_t at);

  // Waits until the condition holds. False after an abort.
  bool wait(const std::function<bool()>& condition) const;

 private:
  struct Mailbox;
  struct Header;
  Mailbox& mailbox(int from, int to) const;
  char* chunk(int from, int to, uint64_t number) const;

  Header* header_;
  char *slots_, *mail_;
  uint64_t sequence_ = 0;
  std::atomic<bool> aborted_{false};
};

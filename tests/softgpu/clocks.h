// Which uses of memory are ordered? Vector clocks (Mattern 1989; FastTrack, Flanagan and Freund 2009), kept as the host
// issues things: so a race is found at any speed, in whatever order things happen to run.
//
// A lane is the host or a stream; a clock has, for each lane, how many of its uses are known to be over. Two uses of the
// same bytes, one of which writes, must be ordered by streams, events or the host. Memory that is given back must have
// been used before by what its home stream, or a recorded one, has come to: its allocator may give it to somebody else.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

using Clock = std::vector<uint32_t>;
constexpr int HOST = 0;

struct Use { int lane; uint32_t count; bool writes; size_t start, stop; const char* what; };

struct Traced {  // some memory: whose, and its uses, but for those that later ones stand for
  int home = HOST;
  std::vector<Use> uses;
  std::set<int> recorded;
};

struct Access { Traced* memory; bool writes; size_t start, stop; };

struct Exchange { std::string what; uint32_t behind; };  // what a communicator was given, behind how much of stream 0

class Clocks {
 public:
  std::mutex lock;  // of this and of all Traced
  std::vector<std::string> races;
  std::vector<Exchange> exchanges;

  int lane(int device, int64_t stream) {
    auto [found, fresh] = lanes_.try_emplace({device, stream}, (int)names_.size());
    if (fresh) names_.push_back(stream ? "stream " + std::to_string(stream) : "the default stream");
    return found->second;
  }

  const Clock& of(int lane) { return at(lane); }
  void join(int lane, const Clock& other) {
    auto& clock = at(lane);
    if (clock.size() < other.size()) clock.resize(other.size());
    for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
  }
  bool is_over(int lane, uint32_t count) { return known(at(HOST), lane) >= count; }  // for the host

  // Something is issued to a lane; returns its number there. A race is a sentence in `races`.
  uint32_t issue(int lane, const char* what, const std::vector<Access>& accesses) {
    join(lane, at(HOST));
    auto& clock = at(lane);
    if (clock.size() <= (size_t)lane) clock.resize(lane + 1);
    uint32_t count = ++clock[lane];
    for (auto& access : accesses) {
      Use use{lane, count, access.writes, access.start, access.stop, what};
      auto& uses = access.memory->uses;
      for (auto& x : uses)
        if ((use.writes || x.writes) && use.start < x.stop && x.start < use.stop && known(clock, x.lane) < x.count)
          races.push_back(std::string(what) + " in " + names_[lane] + (use.writes ? " writes" : " reads") + " what " +
                          x.what + " in " + names_[x.lane] + (x.writes ? " may still write" : " may still read"));
      std::erase_if(uses, [&](auto& x) {
        return use.start <= x.start && x.stop <= use.stop && (use.writes || (x.lane == lane && !x.writes));
      });
      uses.push_back(use);
    }
    return count;
  }

  // Memory is given back. What is recorded counts as waited for: so does its allocator.
  void give_back(Traced& memory) {
    Clock clock = at(memory.home);
    auto add = [&](const Clock& other) {
      if (clock.size() < other.size()) clock.resize(other.size());
      for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
    };
    add(at(HOST));
    for (int lane : memory.recorded) add(at(lane));
    for (auto& x : memory.uses)
      if (known(clock, x.lane) < x.count)
        races.push_back("memory of " + names_[memory.home] + " is given back, which " + x.what + " in " + names_[x.lane] +
                        (x.writes ? " may still write" : " may still read"));
    memory.uses.clear();
    memory.recorded.clear();
  }

  void exchange(const std::string& what, int lane, int device) {
    exchanges.push_back({what, known(at(lane), this->lane(device, 0))});
  }

 private:
  static uint32_t known(const Clock& clock, int lane) { return (size_t)lane < clock.size() ? clock[lane] : 0; }
  Clock& at(int lane) { return clocks_[lane]; }
  std::map<int, Clock> clocks_;
  std::map<std::pair<int, int64_t>, int> lanes_;
  std::vector<std::string> names_{"the host"};
};

inline Clocks& clocks = *new Clocks;  // never destroyed: threads outlive the interpreter

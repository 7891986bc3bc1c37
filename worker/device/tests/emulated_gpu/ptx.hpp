// Parses the PTX that NVIDIA's compiler generates for the kernels into instructions that a warp can
// run (warp.hpp).
//
// Every operand is a slot of the warp's registers, including constants, addresses of variables and
// special registers. PTX that the compiler does not generate for the kernels is an error that shows
// the line.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace ptx {
[[noreturn]] inline void stop(const std::string& what) {
    fprintf(stderr, "emulated GPU: %s\n", what.c_str());
    abort();
}

enum class Space { GLOBAL, SHARED, LOCAL, PARAM, GENERIC };
// How the warp's scheduler treats an instruction. Several lanes execute a COLLECTIVE one as a
// group.
enum class InstructionKind { PLAIN, BRANCH, EXIT, COLLECTIVE, BARRIER };

struct Warp;
struct Instruction;
typedef void (*Handler)(Warp&, const Instruction&, uint32_t lanes);

constexpr int OPERANDS = 76;
struct Instruction {
    Handler run = nullptr;
    InstructionKind kind = InstructionKind::PLAIN;
    int guard = -1; // slot of the predicate
    bool negated = false;
    int slots[OPERANDS]; // in the order of the text, vectors element by element
    int count = 0;
    int members = -1; // slot of the mask of lanes that execute it as a group; -1: all
    Space space = Space::GENERIC;
    int base = -1; // slot of an address; `offset` is added to it
    int64_t offset = 0;
    int bytes = 0, elements = 1; // bytes per element and elements of an access
    bool is_signed = false;
    bool splits = false; // the first operand is a vector
    bool is_product = false; // a matmul of a warpgroup
    uint32_t target = 0;
    std::string text;
};

// Number of inaccessible bytes between static variables in shared memory.
constexpr uint32_t GAP = 64;
// The first bytes of a block's shared memory are reserved by the system.
constexpr uint32_t RESERVED = 1024;
// The beginnings of these spaces among generic addresses; addresses of the host are smaller.
constexpr uint64_t SHARED_WINDOW = 1ull << 60, LOCAL_WINDOW = 1ull << 61;

struct Range {
    uint32_t begin, end;
};

// Special registers, in the order of their slots, which come first.
constexpr const char* SPECIAL[] = {"%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z",
                                   "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid"};
constexpr int SPECIAL_COUNT = sizeof SPECIAL / sizeof *SPECIAL;

struct Kernel {
    std::string name;
    std::vector<Range> parameters; // byte range of each in the parameter space
    uint32_t parameter_bytes = 0, local_bytes = 0;
    uint32_t static_end = RESERVED; // where dynamic shared memory begins
    std::vector<Range> variables;   // static variables in shared memory
    unsigned max_threads = 256;     // per block; a kernel needs .maxntid for more, or it may run out of registers
    bool uses_warpgroups = false;                   // contains instructions of warpgroups
    int smallest_shared_access = 4;                 // bytes of the smallest access to shared memory, at most 4
    int slots = 0;
    std::vector<std::pair<int, uint64_t>> constants; // slot, value
    std::vector<Instruction> code;
};

struct Opcode {
    Handler run;
    InstructionKind kind;
};
// Returns the entry of an opcode, or null if the opcode is unknown or accesses memory
// (opcodes.hpp).
const Opcode* find_opcode(const std::string& name);
Handler find_memory_access(const std::string& name);

inline uint32_t aligned(uint32_t at, uint32_t to) { return (at + to - 1) / to * to; }
inline int type_bytes(const std::string& type) { // "u32", "b8", "pred"
    int bits = atoi(type.c_str() + type.find_first_of("0123456789"));
    return bits / 8;
}

// Divides PTX into tokens. Statements end with ';' or ':', or are '{' or '}'. Braces after an
// opcode enclose a vector.
struct Tokenizer {
    const char* at;
    // Returns the next token, such as `.entry`, `%r1`, `%rd1+4`, `{` or `,`. It is empty at the
    // end.
    std::string next() {
        skip();
        const char* begin = at;
        if (!*at) return "";
        if (strchr("{}()[],;:|<>=", *at)) return std::string(begin, ++at);
        while (*at && !isspace((unsigned char)*at) && (!strchr("{}()[],;:|<>=", *at) || (at[0] == ':' && at[1] == ':'))) at += *at == ':' ? 2 : 1;
        return std::string(begin, at);
    }
    std::string peek() {
        const char* saved = at;
        std::string word = next();
        at = saved;
        return word;
    }
    void skip() {
        for (;;) {
            while (isspace((unsigned char)*at)) at++;
            if (at[0] != '/' || at[1] != '/') return;
            while (*at && *at != '\n') at++;
        }
    }
    void skip_line() {
        while (*at && *at != '\n') at++;
    }
    void until(const char* end) {
        std::string word;
        do word = next();
        while (!word.empty() && word != end);
    }
};

struct Variable {
    Space space;
    uint32_t bytes, align;
    uint32_t at = 0;
    bool is_allocated = false, is_dynamic = false;
};

struct Module {
    std::map<std::string, Kernel> kernels;
};
// Parses PTX (interpreter.cpp).
Module parse_module(const char* source);
// Runs a kernel on every block of a grid, one after the other, from the last warp of a block to the
// first if `backwards` (interpreter.cpp). `is_accessible` returns whether GPU memory is allocated.
void run_grid(const Kernel& kernel, const std::vector<uint8_t>& parameters, const unsigned (&grid)[3], const unsigned (&threads)[3], uint32_t dynamic_shared,
              bool (*is_accessible)(uint64_t at, size_t bytes), bool backwards);

class Parser {
  public:
    explicit Parser(const char* source) : text{source} {}
    Module module() {
        Module all;
        for (std::string word = text.next(); !word.empty(); word = text.next()) {
            if (word == ".version" || word == ".target" || word == ".address_size") text.next();
            else if (word == ".visible" || word == ".extern" || word == ".weak") continue;
            else if (word == ".file") text.skip_line();
            else if (word == ".section") text.until("}"); // information for debuggers
            else if (word == ".global") text.until(";"); // constants of templates, which are never read
            else if (word == ".shared") variable(Space::SHARED, module_variables);
            else if (word == ".entry") {
                Kernel k = entry();
                all.kernels[k.name] = std::move(k);
            } else if (word != ",") stop("PTX: unknown word " + word);
        }
        return all;
    }

  private:
    Tokenizer text;
    std::map<std::string, Variable> module_variables;
    // State of the kernel that is being parsed.
    Kernel kernel;
    std::map<std::string, Variable> variables;
    std::map<std::string, int> registers;
    std::map<uint64_t, int> constant_slots;
    std::map<std::string, uint32_t> labels;
    std::vector<std::pair<size_t, std::string>> jumps;

    // Parses the declaration of a variable, such as `.align 4 .b8 name[128];`.
    void variable(Space space, std::map<std::string, Variable>& into) {
        Variable v{space, 0, 1};
        std::string word = text.next();
        if (word == ".align") {
            v.align = (uint32_t)atoi(text.next().c_str());
            word = text.next();
        }
        v.bytes = (uint32_t)type_bytes(word);
        std::string name = text.next();
        if (text.peek() == "[") {
            text.next();
            std::string count = text.next();
            v.is_dynamic = count == "]";
            if (!v.is_dynamic) {
                v.bytes *= (uint32_t)atoi(count.c_str());
                text.next();
            }
        }
        into[name] = v;
        text.until(";");
    }

    Kernel entry() {
        kernel = Kernel();
        variables = module_variables;
        registers.clear(), constant_slots.clear(), labels.clear(), jumps.clear();
        kernel.name = text.next();
        kernel.slots = SPECIAL_COUNT;
        for (int i = 0; i < SPECIAL_COUNT; i++) registers[SPECIAL[i]] = i;
        if (text.next() != "(") stop("PTX: an entry without parameters");
        while (text.peek() != ")") parameter();
        text.next();
        for (std::string word = text.next(); word != "{"; word = text.next())
            if (word == ".maxntid") kernel.max_threads = (unsigned)atoi(text.next().c_str());
        for (int depth = 1; depth > 0;) {
            std::string word = text.next();
            if (word == "{") depth++;
            else if (word == "}") depth--;
            else statement(word);
        }
        for (auto& [at, label] : jumps) {
            if (!labels.count(label)) stop("PTX: undefined label " + label);
            kernel.code[at].target = labels[label];
        }
        Instruction end;
        end.kind = InstructionKind::EXIT;
        kernel.code.push_back(end);
        kernel.static_end = aligned(kernel.static_end, 16);
        for (auto& [slot, value] : dynamic_addresses) kernel.constants.push_back({slot, kernel.static_end + value});
        dynamic_addresses.clear();
        for (size_t at : dynamic_accesses) kernel.code[at].offset += kernel.static_end;
        dynamic_accesses.clear();
        return kernel;
    }

    // Parses a kernel parameter, such as `.param .align 8 .b8 name[16],`.
    void parameter() {
        std::string word = text.next();
        uint32_t align = 0, count = 1;
        if (word == ",") word = text.next();
        if (word == ".param") word = text.next();
        if (word == ".align") {
            align = (uint32_t)atoi(text.next().c_str());
            word = text.next();
        }
        uint32_t bytes = (uint32_t)type_bytes(word);
        std::string name = text.next();
        while (name[0] == '.') { // .ptr .align 1
            if (name == ".align") text.next();
            name = text.next();
        }
        if (text.peek() == "[") {
            text.next();
            count = (uint32_t)atoi(text.next().c_str());
            text.next();
        }
        uint32_t begin = aligned(kernel.parameter_bytes, align ? align : bytes), end = begin + bytes * count;
        kernel.parameters.push_back({begin, end});
        kernel.parameter_bytes = end;
        Variable v{Space::PARAM, bytes * count, 1};
        v.at = begin, v.is_allocated = true;
        variables[name] = v;
    }

    void statement(std::string word) {
        if (word == ".reg") return declare_registers();
        if (word == ".loc") return text.skip_line();
        if (word == ".pragma") return text.until(";");
        if (word == ".shared") return variable(Space::SHARED, variables);
        if (word == ".local") return variable(Space::LOCAL, variables);
        if (text.peek() == ":") {
            text.next();
            labels[word] = (uint32_t)kernel.code.size();
            return;
        }
        const char* begin = text.at - word.size();
        Instruction i;
        if (word[0] == '@') {
            i.negated = word[1] == '!';
            i.guard = slot(word.substr(i.negated ? 2 : 1));
            word = text.next();
        }
        operands(i, word);
        i.text.assign(begin, text.at);
        decode(i, word);
        kernel.code.push_back(i);
    }

    // Parses `.reg .b32 %r<16>;` or `.reg .b16 tmp;`. A register without `%` gets its slot here,
    // the others at their first use.
    void declare_registers() {
        for (std::string word = text.next(); word != ";" && !word.empty(); word = text.next())
            if (isalpha((unsigned char)word[0]) || word[0] == '_') registers[word] = kernel.slots++;
    }

    void operands(Instruction& i, const std::string& opcode) {
        for (std::string word = text.next(); word != ";"; word = text.next()) {
            if (word.empty()) stop("PTX: " + opcode + " is not terminated");
            i.splits |= word == "{" && i.count == 0;
            if (word == "," || word == "{" || word == "}" || word == "|") continue;
            if (word == "[") {
                address(i, text.next());
                if (i.base >= 0 && text.peek() != "]") stop("PTX: unsupported address of " + opcode);
                text.until("]");
            } else if (opcode.rfind("bra", 0) == 0) {
                jumps.push_back({kernel.code.size(), word});
            } else {
                if (i.count == OPERANDS) stop("PTX: too many operands of " + opcode);
                i.slots[i.count++] = slot(word);
            }
        }
    }

    // Parses an address operand: `%rd1`, `%rd1+-16`, `name`, `name+4`. The second address of a copy
    // is an ordinary operand.
    void address(Instruction& i, const std::string& word) {
        size_t plus = word.find('+');
        std::string name = word.substr(0, plus);
        int64_t offset = plus == std::string::npos ? 0 : strtoll(word.c_str() + plus + 1, nullptr, 0);
        auto v = variables.find(name);
        if (v == variables.end()) {
            if (i.base >= 0) {
                i.slots[i.count++] = slot(name);
                i.slots[i.count++] = constant_slot((uint64_t)offset);
                return;
            }
            i.base = slot(name);
            i.offset = offset;
            return;
        }
        if (i.base >= 0) stop("PTX: the second address is a variable");
        i.offset = offset + allocate(v->second);
        if (v->second.is_dynamic) dynamic_accesses.push_back(kernel.code.size());
        i.base = constant_slot(0);
    }

    uint32_t allocate(Variable& v) {
        if (v.is_allocated) return v.at;
        v.is_allocated = true;
        if (v.is_dynamic) return v.at = 0;
        uint32_t& end = v.space == Space::LOCAL ? kernel.local_bytes : kernel.static_end;
        v.at = aligned(end, v.align);
        end = v.at + v.bytes;
        if (v.space == Space::SHARED) {
            kernel.variables.push_back({v.at, end});
            end += GAP;
        }
        return v.at;
    }

    int new_constant(uint64_t value) {
        kernel.constants.push_back({kernel.slots, value});
        return kernel.slots++;
    }
    int constant_slot(uint64_t value) {
        auto known = constant_slots.find(value);
        return known != constant_slots.end() ? known->second : constant_slots[value] = new_constant(value);
    }
    int slot(const std::string& word) {
        auto known = registers.find(word);
        if (known != registers.end()) return known->second;
        if (word[0] == '%') return registers[word] = kernel.slots++;
        if (isdigit((unsigned char)word[0]) || word[0] == '-') {
            bool bits = word[0] == '0' && (word[1] == 'f' || word[1] == 'F' || word[1] == 'd' || word[1] == 'D');
            if (bits) return constant_slot(strtoull(word.c_str() + 2, nullptr, 16));
            return constant_slot(word[0] == '-' ? (uint64_t)strtoll(word.c_str(), nullptr, 0) : strtoull(word.c_str(), nullptr, 0));
        }
        auto v = variables.find(word);
        if (v == variables.end()) stop("PTX: unknown word " + word);
        uint64_t at = allocate(v->second);
        if (v->second.is_dynamic) {
            dynamic_addresses.push_back({kernel.slots, at});
            return kernel.slots++;
        }
        return constant_slot(at);
    }
    // Slots and instructions that refer to dynamic shared memory, which begins after all static
    // variables.
    std::vector<std::pair<int, uint64_t>> dynamic_addresses;
    std::vector<size_t> dynamic_accesses;

    void decode(Instruction& i, const std::string& opcode) {
        if (const Opcode* known = find_opcode(opcode)) {
            i.run = known->run;
            i.kind = known->kind;
            kernel.uses_warpgroups |= opcode.rfind("wgmma", 0) == 0;
            i.is_product = opcode.rfind("wgmma.mma_async", 0) == 0;
            bool masked = opcode == "bar.warp.sync";
            for (const char* begin : {"shfl", "vote", "redux"}) masked |= opcode.rfind(begin, 0) == 0;
            if (masked) i.members = i.slots[--i.count];
            return;
        }
        // ld.global.v4.f32: space, elements, type
        std::vector<std::string> parts;
        for (size_t at = 0, dot; at <= opcode.size(); at = dot + 1) {
            dot = std::min(opcode.find('.', at), opcode.size());
            parts.push_back(opcode.substr(at, dot - at));
        }
        static const std::map<std::string, Space> spaces = {
            {"global", Space::GLOBAL}, {"shared", Space::SHARED}, {"local", Space::LOCAL}, {"param", Space::PARAM}};
        i.run = find_memory_access(parts[0]);
        if (!i.run || parts.size() < 2) stop("PTX: unknown instruction " + i.text);
        for (size_t part = 1; part + 1 < parts.size(); part++) {
            auto space = spaces.find(parts[part]);
            if (space != spaces.end()) i.space = space->second;
            else if (parts[part] == "v2" || parts[part] == "v4") i.elements = parts[part][1] - '0';
            else if (parts[part] != "nc") stop("PTX: unknown instruction " + i.text);
        }
        i.bytes = type_bytes(parts.back());
        if (i.space == Space::SHARED || i.space == Space::GENERIC) kernel.smallest_shared_access = std::min(kernel.smallest_shared_access, i.bytes);
        i.is_signed = parts.back()[0] == 's';
    }
};
} // namespace ptx

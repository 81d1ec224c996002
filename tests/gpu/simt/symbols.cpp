/* tests/gpu/simt/symbols.cpp - names, from the running program's own file: of kernels, of shared arrays and
 * their extents, of source lines (by addr2line, where binutils is installed).
 *
 * A __shared__ array compiles to a static one inside a function: its symbol begins with _ZZ (Itanium C++ ABI,
 * "local names") and lies in a writable section. Nothing else of a .cu file or of the executor may be such a
 * static; device code cannot have one. A program without symbols (stripped) cannot be used: it ends with a sentence.
 *
 * One OS thread. */
#include "simt_impl.h"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <map>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

namespace {

struct function { uintptr_t begin, end; const char *mangled; std::string name; };
struct range { uintptr_t begin, end; };

struct program {
    std::string path;
    uintptr_t bias = 0;
    std::vector<function> functions;
    std::vector<std::string> shared_names;
    std::vector<symbols_shared> shared;
    std::vector<range> constants;
    std::map<const void *, std::string> lines;
    program();
    void read_symbols(const char *file, const ElfW(Ehdr) *e);
};

int first_object(struct dl_phdr_info *info, size_t, void *p)
{
    program *self = static_cast<program *>(p);
    self->bias = info->dlpi_addr;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) &h = info->dlpi_phdr[i];
        if (h.p_type == PT_LOAD && !(h.p_flags & PF_W))
            self->constants.push_back({ info->dlpi_addr + h.p_vaddr, info->dlpi_addr + h.p_vaddr + h.p_memsz });
    }
    return 1; /* the program itself comes first */
}

std::string demangle(const char *mangled)
{
    int status = 0;
    char *d = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
    std::string s = d ? d : mangled;
    free(d);
    return s;
}

/* "void ns::k<float>(float*, int)" becomes "ns::k<float>". */
std::string without_parameters(std::string s)
{
    const std::string hidden = "(anonymous namespace)::";
    for (size_t at; (at = s.find(hidden)) != std::string::npos;) s.erase(at, hidden.size());
    size_t depth = 0, begin = 0, end = s.size();
    for (size_t i = 0; i < s.size(); i++) {
        if (s[i] == '<') depth++;
        if (s[i] == '>' && depth) depth--;
        if (depth) continue;
        if (s[i] == ' ') begin = i + 1;
        if (s[i] == '(') {
            end = i;
            break;
        }
    }
    return s.substr(begin, end - begin);
}

[[noreturn]] void unusable(const char *why)
{
    fprintf(stderr, "simt: cannot read this program's own symbols (%s): shared arrays are found by them; link without "
            "-s and do not strip\n", why);
    abort();
}

/* "k(float*)::tile" or, of a template, "void k<float>(float*)::tile": what follows the last "::". */
std::string variable_name(const std::string &whole)
{
    size_t at = whole.rfind("::");
    return at == std::string::npos ? whole : whole.substr(at + 2);
}

void program::read_symbols(const char *file, const ElfW(Ehdr) *e)
{
    const ElfW(Shdr) *sections = reinterpret_cast<const ElfW(Shdr) *>(file + e->e_shoff), *table = nullptr;
    for (int i = 0; i < e->e_shnum; i++)
        if (sections[i].sh_type == SHT_SYMTAB) table = &sections[i];
    if (!table) unusable("no symbol table");
    const char *names = file + sections[table->sh_link].sh_offset;
    const ElfW(Sym) *s = reinterpret_cast<const ElfW(Sym) *>(file + table->sh_offset), *end = s + table->sh_size / sizeof *s;
    for (; s < end; s++) {
        const char *name = names + s->st_name;
        uintptr_t begin = bias + s->st_value;
        if (s->st_shndx == SHN_UNDEF || s->st_shndx >= e->e_shnum) continue;
        if (ELF64_ST_TYPE(s->st_info) == STT_FUNC) functions.push_back({ begin, begin + s->st_size, name, "" });
        if (ELF64_ST_TYPE(s->st_info) != STT_OBJECT || strncmp(name, "_ZZ", 3) != 0 || s->st_size == 0 ||
            !(sections[s->st_shndx].sh_flags & SHF_WRITE))
            continue;
        shared.push_back({ begin, s->st_size, nullptr });
        shared_names.push_back(variable_name(demangle(name)));
    }
}

program::program()
{
    char link[4096];
    ssize_t n = readlink("/proc/self/exe", link, sizeof link - 1);
    if (n <= 0) unusable("no /proc");
    path.assign(link, (size_t)n);
    dl_iterate_phdr(first_object, this);
    int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) unusable("its file cannot be opened");
    void *m = mmap(nullptr, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0); /* kept: names point into it */
    close(fd);
    if (m == MAP_FAILED) unusable("its file cannot be mapped");
    read_symbols(static_cast<const char *>(m), static_cast<const ElfW(Ehdr) *>(m));
    for (size_t i = 0; i < shared.size(); i++) shared[i].name = shared_names[i].c_str();
    std::sort(functions.begin(), functions.end(), [](const function &a, const function &b) { return a.begin < b.begin; });
}

program *this_program;

program &self(void)
{
    if (!this_program) this_program = new program();
    return *this_program;
}

} // namespace

size_t symbols_shared_arrays(const symbols_shared **out)
{
    *out = self().shared.data();
    return self().shared.size();
}

const char *symbols_function(const void *address)
{
    uintptr_t a = reinterpret_cast<uintptr_t>(address);
    std::vector<function> &f = self().functions;
    auto after = std::upper_bound(f.begin(), f.end(), a, [](uintptr_t v, const function &x) { return v < x.begin; });
    if (after == f.begin()) return "?";
    function &found = *--after;
    if (a != found.begin && a >= found.end) return "?";
    if (found.name.empty()) found.name = without_parameters(demangle(found.mangled));
    return found.name.c_str();
}

const char *symbols_line(const void *pc)
{
    if (!pc) return "";
    program &p = self();
    auto known = p.lines.find(pc);
    if (known != p.lines.end()) return known->second.c_str();
    std::string text;
    char command[4400];
    /* A return address: the call is before it. */
    snprintf(command, sizeof command, "exec addr2line -i -e '%s' 0x%zx 2>/dev/null", p.path.c_str(),
             (size_t)(reinterpret_cast<uintptr_t>(pc) - 1 - p.bias));
    FILE *f = popen(command, "r");
    if (f) {
        char line[4096] = "";
        /* From the innermost inlined function outwards: the first that a .cu file wrote. */
        while (fgets(line, sizeof line, f)) {
            line[strcspn(line, " \n")] = '\0';
            const char *slash = strrchr(line, '/');
            if (line[0] != '?' && (text.empty() || strstr(line, ".cu:"))) text = slash ? slash + 1 : line;
            if (strstr(line, ".cu:")) break;
        }
        while (fgets(line, sizeof line, f)) {} /* else addr2line complains of a closed pipe */
        pclose(f);
    }
    return (p.lines[pc] = text).c_str();
}

bool symbols_constant(uintptr_t a, size_t bytes)
{
    for (const range &r : self().constants)
        if (a >= r.begin && a + bytes <= r.end) return true;
    return false;
}

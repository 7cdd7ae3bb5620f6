/* A library to preload: the n-th call of a kind fails, as a page says that all processes of a case have mapped. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* As CALLS, ROLES and Page in page.py. */
enum { OPEN, LIST, STAT, READ, WRITE, FSYNC, RENAME, LINK, UNLINK, MKDIR, RMDIR, FALLOCATE, TRUNCATE, MMAP, CLOSE, FLOCK,
       COPY, CALLS };
enum { ROLES = 3, PATH = 512, FOREVER = 1, SHORT = 2 };

struct page {
  int armed, call, role, error, mode, unused;
  long number, fired;
  long made[ROLES * CALLS];
  char within[PATH], named[PATH], where[PATH];
};

static struct page *page;
static int own_role = -1;

__attribute__((constructor)) static void map_page(void) {
  const char *path = getenv("FAILING_CALLS_PAGE");
  int fd = path ? open(path, O_RDWR) : -1;
  void *mapped = fd < 0 ? MAP_FAILED : mmap(0, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (fd >= 0) close(fd);
  if (mapped != MAP_FAILED) page = mapped;
}

/* Makes this process one of the case; before, its calls pass uncounted. */
void failing_calls_role(int role) { own_role = role; }

/* 1 if this call fails, with errno set; 0 if it goes on, perhaps with less to do. */
static int fails(int call, const char *name, const char *path, size_t *size) {
  if (!page || !page->armed || own_role < 0 || !path || !strstr(path, page->within) || !strstr(path, page->named)) return 0;
  long number = __sync_add_and_fetch(&page->made[own_role * CALLS + call], 1);
  if (call != page->call || own_role != page->role) return 0;
  if (page->mode & FOREVER ? number < page->number : number != page->number) return 0;
  if (page->mode & SHORT && !(size && *size > 1)) return 0;
  if (__sync_add_and_fetch(&page->fired, 1) == 1) snprintf(page->where, PATH, "%s %s", name, path);
  if (page->mode & SHORT) {
    *size /= 2;
    return 0;
  }
  errno = page->error;
  return 1;
}

static const char *path_of(int fd, char *buffer) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, buffer, PATH - 1);
  if (length < 0) return 0;
  buffer[length] = 0;
  return buffer;
}

static const char *path_at(int directory, const char *path, char *buffer) {
  char within[PATH];
  if (!path || path[0] == '/' || directory == AT_FDCWD || !path_of(directory, within)) return path;
  if (!path[0]) return strcpy(buffer, within);
  snprintf(buffer, PATH, "%.255s/%.255s", within, path);
  return buffer;
}

static int fails_at(int call, const char *name, int directory, const char *path) {
  char buffer[PATH];
  int before = errno, failed;
  if (!page || !page->armed || own_role < 0) return 0;
  failed = fails(call, name, path_at(directory, path, buffer), 0);
  if (!failed) errno = before;
  return failed;
}

static int fails_of(int call, const char *name, int fd, size_t *size) {
  char buffer[PATH];
  int before = errno, failed;
  if (!page || !page->armed || own_role < 0 || fd < 0) return 0;
  failed = fails(call, name, path_of(fd, buffer), size);
  if (!failed) errno = before;
  return failed;
}

/* A short read gets half of what is there, not of what is asked for. */
static int fails_to_read(const char *name, int fd, size_t *size) {
  struct stat found;
  if (!page || !page->armed || own_role < 0 || fstat(fd, &found)) return 0;
  size_t there = *size < (size_t)found.st_size ? *size : (size_t)found.st_size, left = there;
  int failed = fails_of(READ, name, fd, &left);
  if (left < there) *size = left;
  return failed;
}

#define REAL(name) ((__typeof__(&name))real(&real_##name, #name))
static void *real(void **known, const char *name) { return *known ? *known : (*known = dlsym(RTLD_NEXT, name)); }

#define WRAP(type, name, parameters, check, failed, arguments) \
  static void *real_##name; \
  type name parameters { return check ? (failed) : REAL(name) arguments; }

#define MODE(flags) \
  va_list more; \
  va_start(more, flags); \
  mode_t mode = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(more, mode_t) : 0; \
  va_end(more);

#define WRAP_OPEN(name) \
  static void *real_##name; \
  int name(const char *path, int flags, ...) { \
    MODE(flags) \
    return fails_at(OPEN, #name, AT_FDCWD, path) ? -1 : REAL(name)(path, flags, mode); \
  }
#define WRAP_OPENAT(name) \
  static void *real_##name; \
  int name(int directory, const char *path, int flags, ...) { \
    MODE(flags) \
    return fails_at(OPEN, #name, directory, path) ? -1 : REAL(name)(directory, path, flags, mode); \
  }
WRAP_OPEN(open)
WRAP_OPEN(open64)
WRAP_OPENAT(openat)
WRAP_OPENAT(openat64)

WRAP(DIR *, opendir, (const char *path), fails_at(LIST, "opendir", AT_FDCWD, path), NULL, (path))
WRAP(DIR *, fdopendir, (int fd), fails_of(LIST, "fdopendir", fd, 0), NULL, (fd))

#define WRAP_STAT(name, type) \
  WRAP(int, name, (const char *path, struct type *found), fails_at(STAT, #name, AT_FDCWD, path), -1, (path, found))
#define WRAP_STATAT(name, type) \
  WRAP(int, name, (int directory, const char *path, struct type *found, int flags), \
       fails_at(STAT, #name, directory, path), -1, (directory, path, found, flags))
WRAP_STAT(stat, stat)
WRAP_STAT(stat64, stat64)
WRAP_STAT(lstat, stat)
WRAP_STAT(lstat64, stat64)
WRAP_STATAT(fstatat, stat)
WRAP_STATAT(fstatat64, stat64)

WRAP(ssize_t, read, (int fd, void *data, size_t size), fails_to_read("read", fd, &size), -1, (fd, data, size))
WRAP(ssize_t, write, (int fd, const void *data, size_t size), fails_of(WRITE, "write", fd, &size), -1, (fd, data, size))
#define WRAP_PREAD(name, offset_type) \
  WRAP(ssize_t, name, (int fd, void *data, size_t size, offset_type offset), \
       fails_to_read(#name, fd, &size), -1, (fd, data, size, offset))
#define WRAP_PWRITE(name, offset_type) \
  WRAP(ssize_t, name, (int fd, const void *data, size_t size, offset_type offset), \
       fails_of(WRITE, #name, fd, &size), -1, (fd, data, size, offset))
WRAP_PREAD(pread, off_t)
WRAP_PREAD(pread64, off64_t)
WRAP_PWRITE(pwrite, off_t)
WRAP_PWRITE(pwrite64, off64_t)
/* A short one of these ends within the parts that are given whole. */
#define WRAP_VECTOR(name, call) \
  WRAP(ssize_t, name, (int fd, const struct iovec *parts, int count), fails_of(call, #name, fd, 0), -1, (fd, parts, count))
#define WRAP_PVECTOR(name, call, offset_type) \
  WRAP(ssize_t, name, (int fd, const struct iovec *parts, int count, offset_type offset), \
       fails_of(call, #name, fd, 0), -1, (fd, parts, count, offset))
WRAP_VECTOR(readv, READ)
WRAP_VECTOR(writev, WRITE)
WRAP_PVECTOR(preadv, READ, off_t)
WRAP_PVECTOR(preadv64, READ, off64_t)
WRAP_PVECTOR(pwritev, WRITE, off_t)
WRAP_PVECTOR(pwritev64, WRITE, off64_t)

WRAP(int, fsync, (int fd), fails_of(FSYNC, "fsync", fd, 0), -1, (fd))
WRAP(int, fdatasync, (int fd), fails_of(FSYNC, "fdatasync", fd, 0), -1, (fd))

WRAP(int, rename, (const char *old, const char *new), fails_at(RENAME, "rename", AT_FDCWD, old), -1, (old, new))
WRAP(int, renameat, (int from, const char *old, int to, const char *new), fails_at(RENAME, "renameat", from, old), -1,
     (from, old, to, new))
WRAP(int, renameat2, (int from, const char *old, int to, const char *new, unsigned flags),
     fails_at(RENAME, "renameat2", from, old), -1, (from, old, to, new, flags))
WRAP(int, link, (const char *old, const char *new), fails_at(LINK, "link", AT_FDCWD, new), -1, (old, new))
WRAP(int, linkat, (int from, const char *old, int to, const char *new, int flags), fails_at(LINK, "linkat", to, new), -1,
     (from, old, to, new, flags))
WRAP(int, symlink, (const char *to, const char *path), fails_at(LINK, "symlink", AT_FDCWD, path), -1, (to, path))
WRAP(int, symlinkat, (const char *to, int directory, const char *path), fails_at(LINK, "symlinkat", directory, path), -1,
     (to, directory, path))
WRAP(int, unlink, (const char *path), fails_at(UNLINK, "unlink", AT_FDCWD, path), -1, (path))
WRAP(int, unlinkat, (int directory, const char *path, int flags),
     fails_at(flags & AT_REMOVEDIR ? RMDIR : UNLINK, "unlinkat", directory, path), -1, (directory, path, flags))
WRAP(int, mkdir, (const char *path, mode_t mode), fails_at(MKDIR, "mkdir", AT_FDCWD, path), -1, (path, mode))
WRAP(int, mkdirat, (int directory, const char *path, mode_t mode), fails_at(MKDIR, "mkdirat", directory, path), -1,
     (directory, path, mode))
WRAP(int, rmdir, (const char *path), fails_at(RMDIR, "rmdir", AT_FDCWD, path), -1, (path))

#define WRAP_FALLOCATE(name, offset_type) \
  WRAP(int, name, (int fd, int mode, offset_type offset, offset_type size), fails_of(FALLOCATE, #name, fd, 0), -1, \
       (fd, mode, offset, size))
/* These return the error. */
#define WRAP_POSIX_FALLOCATE(name, offset_type) \
  WRAP(int, name, (int fd, offset_type offset, offset_type size), fails_of(FALLOCATE, #name, fd, 0), page->error, \
       (fd, offset, size))
#define WRAP_TRUNCATE(name, offset_type) \
  WRAP(int, name, (int fd, offset_type size), fails_of(TRUNCATE, #name, fd, 0), -1, (fd, size))
#define WRAP_PATH_TRUNCATE(name, offset_type) \
  WRAP(int, name, (const char *path, offset_type size), fails_at(TRUNCATE, #name, AT_FDCWD, path), -1, (path, size))
WRAP_FALLOCATE(fallocate, off_t)
WRAP_FALLOCATE(fallocate64, off64_t)
WRAP_POSIX_FALLOCATE(posix_fallocate, off_t)
WRAP_POSIX_FALLOCATE(posix_fallocate64, off64_t)
WRAP_TRUNCATE(ftruncate, off_t)
WRAP_TRUNCATE(ftruncate64, off64_t)
WRAP_PATH_TRUNCATE(truncate, off_t)
WRAP_PATH_TRUNCATE(truncate64, off64_t)

#define WRAP_MMAP(name, offset_type) \
  WRAP(void *, name, (void *at, size_t size, int protection, int flags, int fd, offset_type offset), \
       fails_of(MMAP, "mmap", fd, 0), MAP_FAILED, (at, size, protection, flags, fd, offset))
WRAP_MMAP(mmap, off_t)
WRAP_MMAP(mmap64, off64_t)

/* As Linux does it: the descriptor is closed, whatever is said. */
static void *real_close;
int close(int fd) {
  int failed = fails_of(CLOSE, "close", fd, 0), number = errno;
  int result = REAL(close)(fd);
  if (!failed) return result;
  errno = number;
  return -1;
}

WRAP(int, flock, (int fd, int how), fails_of(FLOCK, "flock", fd, 0), -1, (fd, how))
WRAP(ssize_t, copy_file_range, (int from, off64_t *at, int to, off64_t *goal, size_t size, unsigned flags),
     fails_of(COPY, "copy_file_range", to, &size), -1, (from, at, to, goal, size, flags))
WRAP(ssize_t, sendfile, (int to, int from, off_t *at, size_t size), fails_of(COPY, "sendfile", to, &size), -1,
     (to, from, at, size))
WRAP(ssize_t, sendfile64, (int to, int from, off64_t *at, size_t size), fails_of(COPY, "sendfile", to, &size), -1,
     (to, from, at, size))

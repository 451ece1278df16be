/* What a disk is sure to hold: preloaded into processes, this keeps a copy of what they have synced in a folder.

   A power cut may drop everything that was written since. fsync and fdatasync of a file below POWER_CUT_ROOT copy its content
   to POWER_CUT_DISK/files/KEY; fsync of a folder writes its entries to POWER_CUT_DISK/folders/KEY, a line for each: d or f, KEY,
   name, ended by NUL. A KEY is inode and time of birth, since numbers of inodes are used again. The call returns once the copy
   has its name, so that what a program was told is synced is kept wherever the processes are killed. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static int key_of(int fd, const char *name, char *key, size_t size, int *folder) {
    struct statx about;
    int flags = *name ? AT_SYMLINK_NOFOLLOW : AT_EMPTY_PATH;
    if (statx(fd, name, flags, STATX_INO | STATX_TYPE | STATX_BTIME, &about)) return -1;
    *folder = S_ISDIR(about.stx_mode);
    if (!*folder && !S_ISREG(about.stx_mode)) return -1;
    snprintf(key, size, "%llu-%lld-%u", (unsigned long long)about.stx_ino, (long long)about.stx_btime.tv_sec,
             about.stx_btime.tv_nsec);
    return 0;
}

static int below_root(int fd) {
    const char *root = getenv("POWER_CUT_ROOT");
    char link[64], path[PATH_MAX];
    if (!root || !getenv("POWER_CUT_DISK")) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    size_t prefix = strlen(root);
    return !strncmp(path, root, prefix) && (path[prefix] == '/' || path[prefix] == 0);
}

/* By the program's own descriptor where it can be read: to close another one of the same file would end SQLite's locks. */
static int copy_file(int fd, FILE *to) {
    char link[64], buffer[1 << 16];
    ssize_t count;
    off_t place = 0;
    int from = fd;
    if ((fcntl(fd, F_GETFL) & O_ACCMODE) == O_WRONLY) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        from = open(link, O_RDONLY | O_CLOEXEC);
    }
    while ((count = pread(from, buffer, sizeof buffer, place)) > 0) {
        if (fwrite(buffer, 1, count, to) != (size_t)count) break;
        place += count;
    }
    if (from != fd) close(from);
    return count;
}

static int list_folder(int fd, FILE *to) {
    int own = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *folder = own < 0 ? NULL : fdopendir(own);
    struct dirent *entry;
    if (!folder) return -1;
    while ((entry = readdir(folder))) {
        char key[96];
        int is_folder;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (key_of(own, entry->d_name, key, sizeof key, &is_folder)) continue;
        fprintf(to, "%c %s %s", is_folder ? 'd' : 'f', key, entry->d_name);
        fputc(0, to);
    }
    closedir(folder);
    return 0;
}

static void keep(int fd) {
    char key[96], kept[PATH_MAX], half[PATH_MAX], lock[PATH_MAX];
    int folder, saved = errno;
    if (below_root(fd) && !key_of(fd, "", key, sizeof key, &folder)) {
        static __thread unsigned number;
        const char *disk = getenv("POWER_CUT_DISK"), *kind = folder ? "folders" : "files";
        snprintf(kept, sizeof kept, "%s/%s/%s", disk, kind, key);
        snprintf(half, sizeof half, "%s/half/%d-%lx-%u", disk, getpid(), (unsigned long)&number, number++);
        snprintf(lock, sizeof lock, "%s/lock", disk);
        int turn = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, 0600); /* one at a time: an older copy never replaces a newer */
        FILE *to = fopen(half, "we");
        if (turn < 0 || !to || flock(turn, LOCK_EX)) abort(); /* a copy that is missing would be a loss of ours */
        int failed = folder ? list_folder(fd, to) : copy_file(fd, to);
        if (fclose(to) || failed || rename(half, kept)) abort();
        close(turn);
    }
    errno = saved;
}

static int synced(const char *name, int fd) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    int result = real(fd);
    if (result == 0) keep(fd);
    return result;
}

int fsync(int fd) { return synced("fsync", fd); }
int fdatasync(int fd) { return synced("fdatasync", fd); }

/* Preloaded into a process: keeps what fsync has made durable, and ends the process at a chosen change of its files.

COMPOSER_POWER_ROOT: the folder that is watched. COMPOSER_POWER_DISK: the folder that gets what is durable: of a file
its bytes (KEY.data), of a folder its names (KEY.names, lines "KEY TYPE NAME"), each as it was at its last fsync, and in
`changes` a byte for every fsync, rename and removal. COMPOSER_POWER_AT: the number of the change before which the
process and its group are killed. A KEY is the inode and the time of its birth, as file systems give inodes of deleted files to new
ones. Read by support/power_cut.py. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int below_root(const char *path) {
    const char *root = getenv("COMPOSER_POWER_ROOT");
    size_t length = root ? strlen(root) : 0;
    return length && !strncmp(path, root, length) && (path[length] == 0 || path[length] == 0x2f);
}

static void change(void) {
    char path[PATH_MAX];
    struct stat status;
    snprintf(path, sizeof path, "%s/changes", getenv("COMPOSER_POWER_DISK"));
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (file < 0 || write(file, ".", 1) != 1 || fstat(file, &status)) abort();
    close(file);
    const char *at = getenv("COMPOSER_POWER_AT");
    if (at && *at && status.st_size >= atol(at)) kill(0, SIGKILL);
}

/* Write KEY and the letter of its type (d, f, l) of a path. */
int power_key(int folder, const char *path, char *key, size_t size) {
    struct statx found;
    int flags = AT_SYMLINK_NOFOLLOW | (*path ? 0 : AT_EMPTY_PATH);
    if (statx(folder, path, flags, STATX_INO | STATX_BTIME | STATX_TYPE, &found)) return -1;
    snprintf(key, size, "%llu-%lld-%u %c", (unsigned long long)found.stx_ino, (long long)found.stx_btime.tv_sec,
             found.stx_btime.tv_nsec, S_ISDIR(found.stx_mode) ? 'd' : S_ISLNK(found.stx_mode) ? 'l' : 'f');
    return 0;
}

/* Keep the bytes of a file, or the names of a folder, in the folder `disk`. */
int power_keep(int fd, const char *disk) {
    static _Atomic int number;
    char key[128], temporary[PATH_MAX], final[PATH_MAX], self[64], buffer[1 << 16];
    if (power_key(fd, "", key, sizeof key)) return -1;
    int is_folder = strchr(key, ' ')[1] == 'd';
    *strchr(key, ' ') = 0;
    snprintf(temporary, sizeof temporary, "%s/.%d.%d", disk, getpid(), number++);
    snprintf(final, sizeof final, "%s/%s.%s", disk, key, is_folder ? "names" : "data");
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    FILE *out = fopen(temporary, "w");
    if (!out) return -1;
    if (is_folder) {
        DIR *folder = opendir(self);
        struct dirent *entry;
        while (folder && (entry = readdir(folder))) {
            if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
            if (!power_key(dirfd(folder), entry->d_name, key, sizeof key)) fprintf(out, "%s %s\n", key, entry->d_name);
        }
        if (folder) closedir(folder);
    } else {
        int file = open(self, O_RDONLY);
        ssize_t count;
        while ((count = read(file, buffer, sizeof buffer)) > 0) fwrite(buffer, 1, count, out);
        close(file);
    }
    return fclose(out) || REAL(rename)(temporary, final);
}

static int synced(int fd, int (*real)(int)) {
    char self[64], path[PATH_MAX];
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(self, path, sizeof path - 1);
    if (length < 0) return real(fd);
    path[length] = 0;
    if (!below_root(path)) return real(fd);
    change();
    if (power_keep(fd, getenv("COMPOSER_POWER_DISK"))) abort();
    return 0;
}

int fsync(int fd) { return synced(fd, REAL(fsync)); }
int fdatasync(int fd) { return synced(fd, REAL(fdatasync)); }

int rename(const char *from, const char *to) {
    if (below_root(to)) change();
    return REAL(rename)(from, to);
}

int unlink(const char *path) {
    if (below_root(path)) change();
    return REAL(unlink)(path);
}

int unlinkat(int folder, const char *path, int flags) {
    char self[64], base[PATH_MAX];
    snprintf(self, sizeof self, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(self, base, sizeof base - 1);
    base[length < 0 ? 0 : length] = 0;
    if (below_root(*path == '/' ? path : base)) change();
    return REAL(unlinkat)(folder, path, flags);
}

int rmdir(const char *path) {
    if (below_root(path)) change();
    return REAL(rmdir)(path);
}

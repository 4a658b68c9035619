/* base/file.c - files that come in, and files that go out whole. */
#include "base/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static weft_status refuse(const char *path, int error)
{
    char text[128];
    return weft_fail(error == ENOMEM ? WEFT_MEMORY : WEFT_IO, "%s: %s", path, strerror_r(error, text, sizeof text));
}

static weft_status open_regular(const char *path, int *fd, size_t *bytes)
{
    struct stat st;
    int opened = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe without a writer would wait for ever */
    if (opened < 0) return refuse(path, errno);
    int error = fstat(opened, &st) != 0 ? errno : S_ISDIR(st.st_mode) ? EISDIR : 0;
    if (error != 0 || !S_ISREG(st.st_mode)) {
        close(opened);
        return error != 0 ? refuse(path, error) : weft_fail(WEFT_IO, "%s: not a regular file", path);
    }
    *fd = opened;
    *bytes = (size_t)st.st_size;
    return WEFT_OK;
}

static void file_destroy(weft_object *object)
{
    weft_file *file = (weft_file *)object;
    if (file->bytes > 0) munmap((void *)file->data, file->bytes);
    free(file->path);
    free(file);
}

weft_status weft_file_map(weft_file **out, const char *path)
{
    int fd;
    size_t bytes;
    WEFT_TRY(open_regular(path, &fd, &bytes));
    void *data = bytes == 0 ? (void *)"" : mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    int error = errno;
    close(fd);
    if (data == MAP_FAILED) return refuse(path, error);
    weft_file *file = calloc(1, sizeof *file);
    char *copy = strdup(path);
    if (file == NULL || copy == NULL) {
        if (bytes > 0) munmap(data, bytes);
        free(file);
        free(copy);
        return weft_fail(WEFT_MEMORY, "no memory to map %s", path);
    }
    weft_object_init(&file->object, file_destroy);
    file->path = copy;
    file->data = data;
    file->bytes = bytes;
    *out = file;
    return WEFT_OK;
}

void weft_file_will_read(const void *begin, size_t bytes)
{
#ifdef MADV_POPULATE_READ
    /* One call fills the page table, instead of a fault for each few pages. */
    size_t page = (size_t)sysconf(_SC_PAGESIZE), skew = (size_t)begin % page;
    if (bytes >= 64 * page) (void)madvise((char *)begin - skew, bytes + skew, MADV_POPULATE_READ);
#else
    (void)begin;
    (void)bytes;
#endif
}

weft_status weft_file_read(const char *path, size_t limit, char **text, size_t *bytes)
{
    int fd;
    size_t size, used = 0;
    WEFT_TRY(open_regular(path, &fd, &size));
    if (size > limit) {
        close(fd);
        return weft_fail(WEFT_FORMAT, "%s: %zu bytes, more than the %zu that such a file may have", path, size, limit);
    }
    char *buffer = malloc(size + 1);
    if (buffer == NULL) {
        close(fd);
        return weft_fail(WEFT_MEMORY, "no memory to read %s", path);
    }
    while (used < size) {
        ssize_t got = read(fd, buffer + used, size - used);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            int error = errno;
            close(fd);
            free(buffer);
            return refuse(path, error);
        }
        if (got == 0) break; /* shorter than it was a moment ago */
        used += (size_t)got;
    }
    close(fd);
    buffer[used] = 0;
    *text = buffer;
    *bytes = used;
    return WEFT_OK;
}

static weft_status cannot_write(const char *path, int error)
{
    char text[128];
    return weft_fail(WEFT_IO, "cannot write %s: %s", path, strerror_r(error, text, sizeof text));
}

/* Where to write: links are followed, and what is there must be a regular file, whose mode stays. */
static weft_status find_target(weft_file_out *out, const char *path)
{
    struct stat there;
    out->mode = 0;
    if (stat(path, &there) != 0) {
        if (strlen(path) >= sizeof out->path) return weft_fail(WEFT_IO, "cannot write to a path of %zu characters", strlen(path));
        strcpy(out->path, path);
    } else {
        if (!S_ISREG(there.st_mode)) return weft_fail(WEFT_IO, "cannot write %s: it is not a regular file", path);
        if (realpath(path, out->path) == NULL) return cannot_write(path, errno);
        out->mode = there.st_mode & 07777;
    }
    snprintf(out->temporary, sizeof out->temporary, "%s.part", out->path);
    return WEFT_OK;
}

weft_status weft_file_can_replace(const char *path)
{
    weft_file_out out;
    WEFT_TRY(find_target(&out, path));
    int file = open(out.temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) return errno == EEXIST ? WEFT_OK : cannot_write(out.path, errno);
    close(file);
    unlink(out.temporary);
    return WEFT_OK;
}

weft_status weft_file_replace_begin(weft_file_out *out, const char *path)
{
    WEFT_TRY(find_target(out, path));
    out->file = fopen(out->temporary, "wb");
    return out->file != NULL ? WEFT_OK : cannot_write(out->path, errno);
}

weft_status weft_file_replace_end(weft_file_out *out, int written)
{
    int error = written ? 0 : errno != 0 ? errno : EIO; /* the first failure is the one to tell of */
    if (error == 0 && out->mode != 0 && fchmod(fileno(out->file), (mode_t)out->mode) != 0) error = errno;
    if (fclose(out->file) != 0 && error == 0) error = errno;
    if (error == 0 && rename(out->temporary, out->path) == 0) return WEFT_OK;
    weft_status status = cannot_write(out->path, error != 0 ? error : errno);
    unlink(out->temporary);
    return status;
}

weft_status weft_file_write(const char *path, const char *text, size_t bytes)
{
    struct stat there;
    if (stat(path, &there) == 0 && !S_ISREG(there.st_mode) && !S_ISDIR(there.st_mode)) {
        FILE *file = fopen(path, "wb");
        if (file == NULL) return cannot_write(path, errno);
        int written = fwrite(text, 1, bytes, file) == bytes;
        written = fclose(file) == 0 && written;
        return written ? WEFT_OK : cannot_write(path, errno);
    }
    weft_file_out out;
    WEFT_TRY(weft_file_replace_begin(&out, path));
    return weft_file_replace_end(&out, fwrite(text, 1, bytes, out.file) == bytes);
}

int weft_file_find_ending(const char *folder, const char *ending, char *name, size_t size)
{
    DIR *listing = opendir(folder);
    size_t end = strlen(ending);
    name[0] = 0;
    for (struct dirent *entry; listing != NULL && (entry = readdir(listing)) != NULL;) {
        size_t length = strlen(entry->d_name);
        if (length < end || length >= size || strcmp(entry->d_name + length - end, ending) != 0) continue;
        if (name[0] == 0 || strcmp(entry->d_name, name) < 0) strcpy(name, entry->d_name);
    }
    if (listing != NULL) closedir(listing);
    return name[0] != 0;
}

int weft_file_kind(const char *path)
{
    struct stat st;
    if (stat(path, &st) != 0) return 0;
    return S_ISREG(st.st_mode) ? 1 : S_ISDIR(st.st_mode) ? 2 : 0;
}

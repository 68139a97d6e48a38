/* tapswitch PREFIX N DELAY_US: an Ethernet switch in user space between N + 1 TAP devices
 * PREFIX0 .. PREFIXN, which forwards every frame after DELAY_US microseconds.
 *
 * It replaces netem on kernels without netem. Frames are up to 64 KiB long, like those
 * that a kernel passes to a real network card, which splits them: this saves CPU time.
 * The program prints "ready" when the devices exist; they disappear at its end.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

/* A header before each frame has the kernel's requests to split it and add checksums. */
enum { HEADER = sizeof(struct virtio_net_hdr), MAX_FRAME = HEADER + 65600 };
enum { MAX_PORTS = 64, QUEUE = 1 << 16, BURST = 16, MAC = 6 };

struct frame {
    int64_t due;
    int port, length;
    unsigned char *bytes;
};

/* A first-in first-out queue, because all frames wait equally long. */
static struct frame queue[QUEUE];
static unsigned head, tail;
static struct pollfd ports[MAX_PORTS];
static unsigned char addresses[MAX_PORTS][MAC];
static int num_ports;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int open_port(const char *prefix, int number) {
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    int offload = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6;
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    snprintf(request.ifr_name, IFNAMSIZ, "%s%d", prefix, number);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request) ||
        ioctl(fd, TUNSETOFFLOAD, offload)) {
        perror("/dev/net/tun");
        exit(1);
    }
    return fd;
}

/* Send a frame to the last known port of its receiver, or to all other ports. */
static void deliver(const struct frame *frame) {
    int to = -1;
    for (int i = 0; i < num_ports; i++)
        if (!memcmp(addresses[i], frame->bytes + HEADER, MAC)) to = i;
    for (int i = 0; i < num_ports; i++)
        if (i != frame->port && (to < 0 || to == i))
            /* A device that is down drops the frame, as an unplugged cable would. */
            if (write(ports[i].fd, frame->bytes, frame->length) < 0) continue;
}

static void receive(int port, int64_t delay) {
    static unsigned char bytes[MAX_FRAME];
    for (int k = 0; k < BURST; k++) {
        int length = read(ports[port].fd, bytes, sizeof bytes);
        if (length < HEADER + 2 * MAC + 2) return;
        memcpy(addresses[port], bytes + HEADER + MAC, MAC);
        if (head - tail == QUEUE) continue;
        struct frame *frame = &queue[head % QUEUE];
        frame->bytes = malloc(length);
        if (!frame->bytes) continue;
        memcpy(frame->bytes, bytes, length);
        frame->length = length;
        frame->port = port;
        frame->due = now() + delay;
        head++;
    }
}

int main(int argc, char **argv) {
    if (argc != 4 || atoi(argv[2]) < 1 || atoi(argv[2]) >= MAX_PORTS) {
        fprintf(stderr, "usage: tapswitch PREFIX N DELAY_US, with N below 64\n");
        return 2;
    }
    num_ports = atoi(argv[2]) + 1;
    int64_t delay = atoll(argv[3]) * 1000;
    /* Without this, the kernel may wake this process 50 us late. */
    prctl(PR_SET_TIMERSLACK, 1000);
    for (int i = 0; i < num_ports; i++)
        ports[i] = (struct pollfd){.fd = open_port(argv[1], i), .events = POLLIN};
    puts("ready");
    fflush(stdout);
    for (;;) {
        struct timespec wait, *until_due = NULL;
        while (head != tail && queue[tail % QUEUE].due <= now()) {
            struct frame *frame = &queue[tail++ % QUEUE];
            deliver(frame);
            free(frame->bytes);
        }
        if (head != tail) {
            int64_t left = queue[tail % QUEUE].due - now();
            if (left < 0) left = 0;
            wait.tv_sec = left / 1000000000;
            wait.tv_nsec = left % 1000000000;
            until_due = &wait;
        }
        if (ppoll(ports, num_ports, until_due, NULL) <= 0) continue;
        for (int i = 0; i < num_ports; i++)
            if (ports[i].revents & POLLIN) receive(i, delay);
    }
}

# k3 - build, test, measure. Plain `make` builds; `make help` lists the rest.
# V=1 shows the commands. CC, CFLAGS and LDFLAGS are yours; the flags that fix the
# bits (NUMERICS 1) come after yours and win.

CC      ?= cc
CFLAGS  ?= -O3 -g
BUILD   ?= build
V       ?= 0
Q        = $(if $(filter 1,$(V)),,@)

# The bits: no contraction, no fast-math, C99. -fno-math-errno changes no value and lets
# rintf, sqrtf and fmaf inline.
K3_BITS  = -std=c99 -D_GNU_SOURCE -fno-fast-math -ffp-contract=off -fno-math-errno \
           -fno-trapping-math
K3_WARN  = -Wall -Wextra -Wpedantic -Wshadow -Wstrict-prototypes -Wmissing-prototypes \
           -Wno-unused-function
K3_OMP  ?= -fopenmp
K3_LIBS  = -lpcre2-8 -ljson-c -lm

# Kernel sets of the machine that will run it.
K3_ARCH := $(shell $(CC) -dumpmachine)
ifneq (,$(filter x86_64%,$(K3_ARCH)))
K3_SETS  = avx2 avx512
else ifneq (,$(filter aarch64%,$(K3_ARCH)))
K3_SETS  = neon
endif
K3_FLAGS_avx2   = -mavx2 -mfma -mf16c
K3_FLAGS_avx512 = -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mprefer-vector-width=512
K3_FLAGS_neon   =

ALL_CFLAGS = $(CFLAGS) $(K3_BITS) $(K3_WARN) $(K3_OMP) $(K3_SAN) $(K3_SETS:%=-DK3_HAVE_%) -DK3_DEMO_DIR='"$(abspath demo)"' -MMD -MP

K3_OBJ  = $(BUILD)/k3.o $(BUILD)/k3_text.o $(K3_SETS:%=$(BUILD)/kernels_%.o)

.PHONY: all clean
all: $(BUILD)/k3

$(BUILD)/k3: $(BUILD)/k3_cli.o $(K3_OBJ)
	@echo "  LD   $@"
	$(Q)$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $^ $(K3_LIBS)

$(BUILD)/kernels_%.o: kernels_%.c | $(BUILD)
	@echo "  CC   $<"
	$(Q)$(CC) $(ALL_CFLAGS) $(K3_FLAGS_$*) -c -o $@ $<

$(BUILD)/%.o: %.c | $(BUILD)
	@echo "  CC   $<"
	$(Q)$(CC) $(ALL_CFLAGS) -c -o $@ $<

$(BUILD):
	$(Q)mkdir -p $@

clean:
	rm -rf $(BUILD)

-include $(wildcard $(BUILD)/*.d)

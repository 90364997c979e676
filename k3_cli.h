/* k3_cli.h - what the files of the `k3` program share; nothing of the engine's is in here. */
#ifndef K3_CLI_H
#define K3_CLI_H

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/gpu.h"
#include "cli/inputs.h"
#include "cli/options.h"
#include "cli/output.h"
#include "k3_common.h"

#endif

#!/bin/sh
# next.sh - what to do after `make demo`; its argument is the program that was built.
set -eu
k3=$1
cat <<EOF

That answer came from the small model in demo/. It works. What to do next:

  $k3 chat                   talk with the small model (/help lists the commands)
  make test                       prove the same bits on this machine, under 5 minutes on 2 cores
  $k3 plan --released        what the real Kimi K3 would need of this machine, and how fast it would be
  sudo make install               k3 and k3-tier into /usr/local/bin

README.md goes on from there: download the real model (1.56 TB), plan, chat.
EOF

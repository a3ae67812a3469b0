#!/usr/bin/env bash
# Makes sure that the system has what no wheel brings: debian.sh PACKAGE …
# What is missing is installed where that is possible; elsewhere the message says which.
set -euo pipefail

has() {
  case $1 in
    libnuma1) ldconfig -p | grep -q 'libnuma\.so\.1' ;; # vLLM's CPU kernels
    chromium) command -v chromium ;;                    # the report's tests
    chromium-driver) command -v chromedriver ;;
    hdf5-tools) command -v h5dump ;;                    # the capture format's tests
    binutils) command -v readelf ;;                     # the manifest's tests
    docker.io) command -v dockerd ;;                    # the containers' tests
    docker-registry | mmdebstrap) command -v "$1" ;;
    iptables) command -v iptables ;;
  esac >/dev/null
}

export PATH="$PATH:/sbin:/usr/sbin"
missing=()
for package in "$@"; do has "$package" || missing+=("$package"); done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "please install, by their Debian names: ${missing[*]}" >&2
  exit 2
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null

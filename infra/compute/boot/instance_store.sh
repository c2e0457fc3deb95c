#!/bin/bash
# Combines the instance's NVMe disks into one fast /scratch, and moves Docker's data there.
#
# This is a boothook: it runs at every boot, before Docker and the ECS agent start. If it fails, the instance still runs
# jobs on its root volume, as instances with the stage's own AMI do: slower jobs are better than starting, and paying for,
# one instance after another.
set -euo pipefail
trap 'echo "trainyard: line $LINENO failed, so /scratch is not on the NVMe disks; jobs only have the root volume" >&2' ERR

udevadm settle || true
# Each disk has several links here.
mapfile -t disks < <(find /dev/disk/by-id -name 'nvme-Amazon_EC2_NVMe_Instance_Storage_*' -exec realpath {} + | sort --unique)
if ((${#disks[@]} == 0)); then
  echo "trainyard: this instance has no NVMe disks"
  exit 0
fi

# After a reboot, the file system still exists: the disks keep their data until the instance stops.
device=$(blkid --label scratch || true)
if [[ -z $device ]]; then
  device=${disks[0]}
  if ((${#disks[@]} > 1)); then
    command -v mdadm >/dev/null || dnf install --assumeyes --quiet mdadm
    device=/dev/md/scratch
    mdadm --create "$device" --run --force --level=0 --raid-devices="${#disks[@]}" "${disks[@]}"
  fi
  mkfs.xfs -f -L scratch "$device"
fi
mkdir -p /scratch
mountpoint --quiet /scratch || mount -o noatime "$device" /scratch
chmod 1777 /scratch

for directory in /var/lib/docker /var/lib/containerd; do
  mountpoint --quiet "$directory" && continue
  mkdir -p "$directory"
  place=/scratch/${directory##*/}
  if [[ ! -d $place ]]; then
    mkdir -m 0710 "$place"
    cp --archive "$directory/." "$place/"
  fi
  mount --bind "$place" "$directory"
done
echo "trainyard: /scratch uses ${#disks[@]} NVMe disks"

#!/bin/bash
# Makes one fast /scratch of the instance's own NVMe disks, and puts there what Docker writes.
#
# A boothook: it runs at every boot, before Docker and the ECS agent start. Where it fails the instance still runs jobs,
# on the room that its root volume has, as one does whose AMI the stage builds: slower jobs are no reason to start, and
# pay for, one instance after the other.
set -euo pipefail
trap 'echo "trainyard: no /scratch on the instance store, line $LINENO failed; jobs have the root volume only" >&2' ERR

udevadm settle || true
# Each disk has several links.
mapfile -t disks < <(find /dev/disk/by-id -name 'nvme-Amazon_EC2_NVMe_Instance_Storage_*' -exec realpath {} + | sort --unique)
if ((${#disks[@]} == 0)); then
  echo "trainyard: this instance has no NVMe disks of its own"
  exit 0
fi

# After a reboot it is there already: the disks keep what they hold until the instance stops.
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
echo "trainyard: /scratch is ${#disks[@]} NVMe disks"

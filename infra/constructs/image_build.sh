# One image of images/, from source to a digest in its repository. CodeBuild runs it in the root of the source; see
# image_build.py for what it is given.
set -euo pipefail

fail() {
  printf 'error: %s\nNext: %s\n' "$1" "$2" >&2
  exit 1
}

repository="" images=""
for pair in $REPOSITORIES; do
  images="$images ${pair%%=*}"
  if [ "${pair%%=*}" = "$IMAGE" ]; then repository="${pair#*=}"; fi
done
if [ -z "$repository" ]; then
  fail "the stage has no repository for an image '$IMAGE'" "name one that it has, as IMAGE:$images"
fi

dockerfile="images/$IMAGE/Dockerfile"
if [ ! -f "$dockerfile" ]; then
  fail "the source has no $dockerfile" "add it to the repository and deploy the image stack, which uploads the source"
fi

# Refuses a release without a row. Everything that must match the release comes from here.
arguments="$(python3 -m jobs.releases ${RELEASE:+"$RELEASE"})"
release="$(sed -n 's/^RELEASE=//p' <<<"$arguments")"
tag="${IMAGE_TAG:-$release}"

registry="${repository%%/*}" name="${repository#*/}"
# Tags cannot be moved: better known now than after a build of half an hour.
taken="$(aws ecr batch-get-image --repository-name "$name" --image-ids imageTag="$tag" \
  --query 'images[].imageId.imageDigest' --output text)"
if [ -n "$taken" ]; then
  fail "$repository has a tag $tag already ($taken), and tags cannot be moved" \
    "give another one as IMAGE_TAG, and deploy it as the stage's image_tag"
fi

options=()
while IFS= read -r argument; do options+=(--build-arg "$argument"); done <<<"$arguments"
echo "building $dockerfile for release $release as $repository:$tag"
DOCKER_BUILDKIT=1 docker build --progress plain --file "$dockerfile" --tag "$repository:$tag" \
  "${options[@]}" --build-arg "REVISION=$SOURCE_REVISION" .

aws ecr get-login-password | docker login --username AWS --password-stdin "$registry"
docker push --quiet "$repository:$tag"
# Not in one pipe: grep ends at its match, and what still writes into the pipe then fails.
digests="$(docker image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$repository:$tag")"
pushed="$(grep --max-count=1 --fixed-strings "$repository@sha256:" <<<"$digests")"
aws ssm put-parameter --name "$DIGEST_PARAMETERS$IMAGE" --type String --overwrite --value "$pushed" >/dev/null
echo "pushed $pushed"

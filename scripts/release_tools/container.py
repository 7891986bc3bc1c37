"""Builds the container file, which makes an image of the Debian package."""
from release_tools.debian import convert_version

TEMPLATE = """\
# Builds an image with {name} {version} from the Debian package in this directory:
#   podman build --tag {name}:{version} --file Containerfile .
# BASE is any image of Debian 10, Ubuntu 20.04 or newer, such as one with the Python of the job.
ARG BASE=debian:12-slim
FROM ${{BASE}}
# The builder sets TARGETARCH to amd64 or arm64.
ARG TARGETARCH
COPY {name}_{package_version}_${{TARGETARCH}}.deb /tmp/{name}.deb
RUN dpkg --install /tmp/{name}.deb && rm /tmp/{name}.deb && {name} --version
LABEL org.opencontainers.image.title="{name}" \\
      org.opencontainers.image.version="{version}" \\
      org.opencontainers.image.licenses="{license}"
ENTRYPOINT ["{name}"]
"""


def build_containerfile(package):
    """Returns the text of the container file, which is the same for all architectures."""
    return TEMPLATE.format(
        name=package.name,
        version=package.version,
        package_version=convert_version(package.version),
        license=package.license,
    )

# Sourced by the scripts that install a package of the operating system. Needs root or sudo.

# install_package NAME [FURTHER PACKAGES ON ALPINE]
install_package() {
	local as_root=""
	if [ "$(id -u)" != 0 ]; then
		as_root=sudo
	fi
	if command -v apt-get > /dev/null; then
		export DEBIAN_FRONTEND=noninteractive
		# Without the lists first: a fresh machine has none, any other one need not wait for them.
		$as_root apt-get install -y -q "$1" || { $as_root apt-get update -q && $as_root apt-get install -y -q "$1"; }
	elif command -v dnf > /dev/null; then
		$as_root dnf install -y -q "$1"
	elif command -v apk > /dev/null; then
		$as_root apk add "$@"
	else
		echo "install the package $1 of your system" >&2
		return 1
	fi
}

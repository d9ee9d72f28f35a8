// Command kubernetes is the stock control plane and node in one binary: it runs
// the component it is called as (a link named kube-apiserver, kubelet, …), or
// the one named by its first argument. One link step instead of six keeps the
// build of a test cluster short, and the components share their pages.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var components = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	"kubectl":                 kubectl.NewDefaultKubectlCommand,
}

func main() {
	name := filepath.Base(os.Args[0])
	if name == "kubernetes" {
		if len(os.Args) < 2 {
			fmt.Fprintln(os.Stderr, "kubernetes: name a component as the first argument: etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubelet or kubectl")
			os.Exit(2)
		}
		name = os.Args[1]
		os.Args = os.Args[1:]
	}
	if name == "etcd" {
		etcdmain.Main(os.Args)
		return
	}
	command, ok := components[name]
	if !ok {
		fmt.Fprintf(os.Stderr, "kubernetes: no component is named %q\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(command()))
}

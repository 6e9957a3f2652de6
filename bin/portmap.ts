console.error('CNI portmap plugin');
